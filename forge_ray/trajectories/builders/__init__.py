"""Builders: from the calls of one rollout to samples. A builder is `build(calls, chosen=None) -> list[Sample]`.

`calls` are a session's calls by completion; `chosen` the ordinals that may be trained (default: every trainable one). A call
that is not chosen, or not trainable, is never a sampled position; where its tokens stand in a later call's prompt they are context.

Every builder keeps these: the trained tokens over all samples are exactly those of the chosen calls, each once; the ids of a
sample are what the engine saw, the prompt and then the sampled ids of its last call; the result depends on nothing but the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from forge_ray.trajectories.builders import chain, per_call
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.sample import Sample

Builder = Callable[[Sequence[Call], Collection[int] | None], list[Sample]]

BUILDERS: dict[str, Builder] = {"chain": chain.build, "per_call": per_call.build}
"""By the name in `train.builder`."""
