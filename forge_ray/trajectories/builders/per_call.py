"""One sample per trained call: its prompt, then what it sampled. OpenForgeRL's own form; samples grow with the number of calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.sample import Sample


def build(calls: Sequence[Call], chosen: Collection[int] | None = None) -> list[Sample]:
    """Samples in the order of the calls; see `forge_ray.trajectories.builders`."""
    samples = []
    for ordinal, call in enumerate(calls):
        if call.trainable and (chosen is None or ordinal in chosen):
            sample = Sample()
            sample.extend_given(call.prompt_ids)
            sample.extend_sampled(call, ordinal)
            samples.append(sample)
    return samples
