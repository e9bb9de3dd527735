"""GSPO: one ratio per sequence, clipped as a whole.

    s_i = exp( 1/|y_i| Σ_t (log π − log π_old) ),   per token −min(s·A, clip(s, 1 − ε_low, 1 + ε_high)·A)

with s_{i,t} = sg[s_i]·π/sg[π] in the token's place, whose value is s_i and whose gradient, averaged over the sequence, is that of s_i
("GSPO- token": equal to GSPO where a sequence has one advantage, and defined where it has several). Zheng et al., Group Sequence Policy
Optimization (arXiv 2507.18071), eq. 5-7 and eq. 13-15; veRL's `loss_mode="gspo"`. A sequence is one call here: the answer that the paper's
ratio is of. Needs whole sequences.
"""

from __future__ import annotations

from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.grpo import clipped
from forge_ray.train_loop.losses.inputs import LossInputs
from forge_ray.train_loop.losses.kl import bounded
from forge_ray.train_loop.losses.reduce import sequence_index, sequence_mean


def per_token(config: Loss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token (n,); logged: `ratio` (the sequence's), `clip_low`, `clip_high` (0 or 1)."""
    mean = sequence_mean((inputs.logprobs - inputs.proximal).detach(), *sequence_index(inputs))
    return clipped(config, bounded(mean + inputs.logprobs - inputs.logprobs.detach()).exp(), inputs.advantages)
