"""CISPO: the score function with a clipped, detached ratio, so that no token's gradient is dropped.

    −sg[ clip(r, 1 − ε_low, 1 + ε_high) ] · A · log π

MiniMax-M1 (arXiv 2506.13585), eq. 4-5, which leaves the lower side open (ε_low = 1 here). They do not print ε_high; the default of 4 (a cap
of 5) is ScaleRL's (arXiv 2510.13786) and what TRL's `loss_type="cispo"` recommends (its `epsilon_high` is the cap itself: 5).
"""

from __future__ import annotations

from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.inputs import LossInputs
from forge_ray.train_loop.losses.kl import bounded


def per_token(config: Loss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token (n,); logged: `ratio`, `clip_low`, `clip_high`: 1 where the ratio was cut, whatever the advantage."""
    ratio = bounded(inputs.logprobs.detach() - inputs.proximal).exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    kind = loss.dtype
    return loss, {"ratio": ratio, "clip_low": (ratio < low).to(kind), "clip_high": (ratio > high).to(kind)}
