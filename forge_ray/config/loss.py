"""`train.loss`: the policy loss."""

from __future__ import annotations

from typing import Literal

from forge_ray.config.values import Beta, NonNegative, Positive, Section


class Loss(Section):
    """The policy loss. Every name is a pure function in `forge_ray.train_loop.losses`."""

    name: Literal["ppo_clip"] = "ppo_clip"
    """`ppo_clip`: PPO's clipped surrogate with the recorded log-probabilities as the old policy."""
    clip_low: Beta = 0.2
    """The ratio is clipped at 1 − clip_low."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped at 1 + clip_high."""
    kl: NonNegative = 0.0
    """Coefficient of the k3 estimate of KL(policy || reference)."""
    entropy: NonNegative = 0.0
    """Coefficient of the entropy bonus."""
    reduction: Literal["token_mean", "trajectory_mean", "constant"] = "token_mean"
    """Mean over the step's trained tokens, mean of trajectory means, or sum / `constant`."""
    constant: Positive | None = None
    """Divisor of `reduction: constant`."""
