"""What a loss is given: one tensor per quantity, one entry per token in the loss.

Tensors have one shape, any (flat (n,) or padded (rows, T)); the mask is boolean, None = every position. The words:

- *sequence*: one call of the model, however the samples were built (a call's tokens lie in one row, or in one trie);
- *trajectory*: one rollout;
- *rollout policy* (`old_logprobs`): what sampled the tokens, as the engine recorded it;
- *proximal policy* (`proximal_logprobs`): the trainer's own numbers before the step's first update (`train.loss.old_policy: recomputed`;
  the decoupled objective of Hilton et al. 2021, arXiv 2110.00641). Without them the rollout policy is the old policy of the ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from forge_ray.errors import ForgeRayError


class Total(NamedTuple):
    """What one optimizer step trains on, over all its micro-batches and ranks. Add them up field by field."""

    tokens: int
    trajectories: int
    sequences: int = 0


class NotFinite(ForgeRayError):
    """NaN or infinity at a trained position."""

    def __init__(self, name: str, count: int, position: str) -> None:
        self.name = name
        super().__init__(f"{name} is NaN or infinite at {count} trained position(s), first at {position}")


@dataclass(frozen=True)
class LossInputs:
    """One part (micro-batch, trie, piece) of an optimizer step. Gradients flow through `logprobs` and `entropy` alone."""

    logprobs: Tensor
    """Nats, of the policy under training, with the recorded temperature."""
    old_logprobs: Tensor
    """Nats, of the rollout policy, as recorded at sampling."""
    advantages: Tensor
    weights: Tensor
    """Factor of a token's whole loss, KL and entropy included."""
    mask: Tensor | None = None
    sequence: Tensor | None = None
    """int64: equal numbers are tokens of one sequence; any numbers, in any order."""
    sequence_tokens: Tensor | None = None
    """Trained tokens of the sequence that the token belongs to. None: they are counted in this part, which then holds sequences whole."""
    trajectory: Tensor | None = None
    """int64: equal numbers are tokens of one trajectory, within this part."""
    trajectory_tokens: Tensor | None = None
    """Trained tokens of the whole trajectory that the token belongs to, on all parts; for `trajectory_mean`."""
    position: Tensor | None = None
    """int64: place of the token in its sequence's text, rising within a sequence; what lies between counts. None: 0, 1, 2 …"""
    staleness: Tensor | None = None
    """int64: weight updates since the version that sampled the token."""
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    """Nats, of the reference policy; needed where `kl` is above 0."""
    teacher_logprobs: Tensor | None = None
    """Nats, of the teacher; needed for distillation."""
    entropy: Tensor | None = None
    """Nats, of the distribution at each token; logged where given, needed where `entropy` is above 0."""
    describe: Callable[[int], str] | None = None
    """Names a flat position in an error."""

    @property
    def proximal(self) -> Tensor:
        """Denominator of the ratios."""
        return self.old_logprobs if self.proximal_logprobs is None else self.proximal_logprobs

    @property
    def trained(self) -> Tensor:
        """The mask as a tensor."""
        return torch.ones_like(self.logprobs, dtype=torch.bool) if self.mask is None else self.mask.bool()

    def trained_only(self) -> LossInputs:
        """Only the tokens under the mask, flat (n,), without a mask: nothing of the others is left. `describe` still names them.

        Raises `NotFinite` by name for what is not finite among them, and `ValueError` for shapes that differ.
        """
        keep = self.trained.reshape(-1).nonzero().squeeze(-1)
        given = self.describe or (lambda index: f"index {index}")
        changes: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Tensor) or field.name == "mask":
                continue
            if value.shape != self.logprobs.shape:
                raise ValueError(f"{field.name} has shape {tuple(value.shape)}, logprobs has {tuple(self.logprobs.shape)}")
            # The backward of index_select writes a plain 0 to every other position, whatever stands there.
            value = value.reshape(-1).index_select(0, keep)
            if value.is_floating_point() and (bad := ~torch.isfinite(value.detach())).any():
                raise NotFinite(field.name, int(bad.sum()), given(int(keep[int(bad.nonzero()[0])])))
            changes[field.name] = value
        return replace(self, **changes, mask=None, describe=lambda index: given(int(keep[index])))
