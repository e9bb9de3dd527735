"""The seam between an update and the way its log-probabilities are computed: rows beside each other (`rows`), or tries (`tree`).

The step (`update`) knows flat tokens: what is in the loss, (n,) of it, in an order of the part's own. How they share forward passes, and in
which order graphs are made and undone, is the part's business; so is meeting the other ranks' passes where the strategy wants that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from forge_ray.train_loop.losses import LossInputs, Total
from forge_ray.train_loop.ranks import Ranks

PartType = TypeVar("PartType", bound="Part")


@dataclass(frozen=True)
class Passes:
    """How forward passes are made on this rank."""

    device: torch.device
    max_tokens: int
    """Tokens whose graphs may be alive at once (a longer sequence goes alone)."""
    ranks: Ranks = field(default_factory=Ranks)
    lockstep: bool = False
    """Every rank must make the same passes: make up for missing ones with empty micro-batches."""
    autocast: bool = False
    """Compute in bfloat16 where autocast would."""
    packed: bool = False
    """The model attends by `attention`: sequences may stand end to end in one row."""

    def cast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def count(self, own: int) -> int:
        """Passes that this rank has to make, `own` of them its own. Collective in lockstep."""
        return self.ranks.most(own) if self.lockstep else own


@dataclass(frozen=True)
class Work:
    """One optimizer update, as a part sees it."""

    module: torch.nn.Module
    """Called for every forward pass."""
    passes: Passes
    loss: Callable[[LossInputs], Tensor]
    """The share of the loss (a scalar with a gradient) of tokens whose log-probabilities have just been computed; keeps their metrics. Call
    it once per token; the shares add up to the loss."""
    backward: Callable[[Tensor, bool], None]
    """`backward(share, last)`: add the gradients of a scalar. `last`: no further backward follows on this rank in this update."""
    step: int
    """Version of the weights before the step's first update."""
    whole_sequences: bool = False
    """`loss` needs all tokens of a sequence in one call (`train.loss.needs_whole_sequences`)."""
    entropy: bool = True
    """Whether `loss` looks at the entropy."""
    entropy_gradient: bool = True
    """Whether `loss` differentiates the entropy; else it may be given as numbers."""


class Part(Protocol):
    """What this rank trains in one update, n tokens in the loss."""

    @property
    def steps(self) -> np.ndarray:
        """int64, (n,): version step of the weights that sampled the token."""
        ...

    @property
    def old_logprobs(self) -> np.ndarray:
        """float32, (n,): nats, as recorded at sampling."""
        ...

    @property
    def origin(self) -> tuple[Sequence[str], np.ndarray, np.ndarray]:
        """Rollouts, and of each token its rollout (int64, (n,), index into them) and its call there (ordinal, int64, (n,)). A call's tokens
        are in the order in which they were sampled."""
        ...

    def total(self) -> Total:
        """What is trained here; add that of other ranks, which hold other trajectories."""
        ...

    def minibatches(self: PartType, parts: int, seed: int | str | None = None) -> list[PartType]:
        """Whole trajectories in `parts` parts, one per update of a pass, drawn by `seed`; some may be empty."""
        ...

    def sampled_by(self: PartType, version: int, most: int) -> PartType:
        """A part with tokens that version `version` sampled (and perhaps others), of at most `most` sequences. It may be empty."""
        ...

    def with_scores(self: PartType, name: str, values: np.ndarray) -> PartType:
        """The same part, whose `LossInputs` have `values` (float32, (n,)) as the field `name`."""
        ...

    def score(self, module: torch.nn.Module, passes: Passes) -> np.ndarray:
        """Log-probabilities, float32 (n,), of all tokens under `module`; no gradients. Collective in lockstep."""
        ...

    def accumulate(self, work: Work) -> None:
        """All gradients of this rank's share of one update. Collective in lockstep."""
        ...
