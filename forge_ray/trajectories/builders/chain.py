"""Calls merged while each prompt begins, token for token, with everything of the call before it.

A call joins the sample whose tokens are the longest prefix of its prompt; the rest of the prompt (tool results, the next user
message, tokens of calls that are not trained) is context. Where no sample fits, because the harness rewrote its history, compacted
it, or started a second agent, a new sample begins with the whole prompt as context. So a sample's ids always are the prompt and the
sampled ids of its last call, and each logprob is conditioned on exactly the tokens it was conditioned on in the engine.

Only trained calls extend a sample: a reply that was never delivered, or was replaced by a retry, does not end the chain for the
call that took its place. Of two calls that both continue one call, the one that completed first joins it, the other begins anew, so
that the shared tokens are trained once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.sample import Sample


def build(calls: Sequence[Call], chosen: Collection[int] | None = None) -> list[Sample]:
    """Samples in the order of their first call; see `forge_ray.trajectories.builders`."""
    samples: list[Sample] = []
    for ordinal, call in enumerate(calls):
        if not call.trainable or (chosen is not None and ordinal not in chosen):
            continue
        sample = _continued(samples, call.prompt_ids)
        if sample is None:
            sample = Sample()
            samples.append(sample)
        sample.extend_given(call.prompt_ids[len(sample) :])
        sample.extend_sampled(call, ordinal)
    return samples


def _continued(samples: list[Sample], prompt: list[int]) -> Sample | None:
    best = None
    for sample in samples:
        longer = best is None or len(sample) > len(best)
        if longer and len(sample) <= len(prompt) and prompt[: len(sample)] == sample.ids:
            best = sample
    return best
