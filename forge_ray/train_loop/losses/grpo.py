"""GRPO: PPO's clipped surrogate with a group-relative advantage.

Per token, with r = exp(log π − log π_old):  −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A)

Shao et al., DeepSeekMath (arXiv 2402.03300), eq. 3; the surrogate is Schulman et al., PPO (arXiv 1707.06347), eq. 7; two bounds as in DAPO
(arXiv 2503.14476), eq. 8. With `clip_dual` c, a token of negative advantage has at most the loss −c·A (dual clip: Ye et al., arXiv
1912.09729, eq. 5; veRL's `clip_ratio_c`). DeepSeekMath divides by each output's length (`reduction: trajectory_mean`); here the default is
`token_mean`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.inputs import LossInputs
from forge_ray.train_loop.losses.kl import bounded


def per_token(config: Loss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token (n,), and what to log of each: `ratio`, `clip_low`, `clip_high` (0 or 1), with `clip_dual` also `clip_dual`."""
    return clipped(config, bounded(inputs.logprobs - inputs.proximal).exp(), inputs.advantages)


def clipped(config: Loss, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of any ratio. `ratio`, `advantages`: (n,)."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    with torch.no_grad():
        metrics = {"ratio": ratio, "clip_low": (ratio < low) & (advantages < 0), "clip_high": (ratio > high) & (advantages > 0)}
    if config.clip_dual is not None:
        bound = -config.clip_dual * advantages
        metrics["clip_dual"] = (advantages < 0) & (loss.detach() > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, {name: value.detach().to(loss.dtype) for name, value in metrics.items()}
