"""A sample: one token sequence that a forward pass reads, with what was recorded about each of its tokens.

Invariants, checked on construction: all per-token lists have the length of `ids`; a position with `mask` true was sampled by the engine
in call `call[i]`, under `temperature[i]` > 0 and weights of version step `steps[i]` >= 0; no position 0 is sampled, since
nothing precedes it. Everywhere else `logprobs` is 0, `steps` -1, `temperature` 1 and `call` -1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forge_ray.errors import ForgeRayError
from forge_ray.trajectories.call import Call, version_step


class SampleError(ForgeRayError):
    """A recorded call that cannot become a sample although it says it can."""


@dataclass
class Sample:
    """Per-token lists of one length; see the module for what holds where `mask` is false."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """Sampled, trainable and chosen for training."""
    logprobs: list[float] = field(default_factory=list)
    """Natural log of the token's probability under the distribution it was drawn from."""
    steps: list[int] = field(default_factory=list)
    """Version step of the weights that sampled the token."""
    temperature: list[float] = field(default_factory=list)
    call: list[int] = field(default_factory=list)
    """Ordinal of the sampling call in its rollout's calls by completion."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        """Number of positions with mask true."""
        return sum(self.mask)

    def extend_given(self, ids: Iterable[int]) -> None:
        """Append tokens that are context only."""
        ids = list(ids)
        count = len(ids)
        self.ids += ids
        self.mask += [False] * count
        self.logprobs += [0.0] * count
        self.steps += [-1] * count
        self.temperature += [1.0] * count
        self.call += [-1] * count

    def extend_sampled(self, call: Call, ordinal: int) -> None:
        """Append the sampled tokens of a trainable call; its prompt must be what the sample holds already."""
        if not call.trainable:
            raise SampleError(f"call {call.id} of session {call.session} is not trainable")
        if not self.ids:
            raise SampleError(f"call {call.id} of session {call.session} has an empty prompt")
        if call.temperature <= 0:
            raise SampleError(f"call {call.id} of session {call.session} was sampled at temperature {call.temperature}: it has no gradient")
        versions = call.versions()
        if len(versions) != len(call.ids):
            raise SampleError(f"call {call.id} of session {call.session}: spans {call.spans} do not cover its {len(call.ids)} tokens")
        count = len(call.ids)
        self.ids += call.ids
        self.mask += [True] * count
        self.logprobs += call.logprobs
        self.steps += [version_step(label) for label in versions]
        self.temperature += [call.temperature] * count
        self.call += [ordinal] * count
