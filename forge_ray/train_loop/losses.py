"""The policy losses: pure functions of tensors.

Invariants:
- **A mask hides everything.** Inputs at masked positions are replaced before any arithmetic, so that a NaN there reaches no value, no
  metric and no gradient. A NaN or an infinity at a trained position raises `NotFinite`, which names the input.
- **Sums, one denominator.** A loss is a sum over trained tokens divided by a number that the caller counted over the whole optimizer
  step: every micro-batch, every rank. So the parts add up, in value, metrics and gradient, to the loss of the whole. Never a mean of means.
  (DDP averages gradients over the ranks: multiply the loss by the number of ranks there, or sum the gradients.)

Per-token tensors have one shape, any (flat (n,) or padded (rows, T)); the mask is boolean, None = every position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.errors import ForgeRayError

LOG_RATIO_BOUND = 20.0
"""Log ratios are cut to ± this before exp, in nats: e^20 is far outside every clip, and nothing overflows."""


class Total(NamedTuple):
    """What one optimizer step trains on, over all its micro-batches and ranks. Add them up field by field."""

    tokens: int
    trajectories: int


class NotFinite(ForgeRayError):
    """NaN or infinity at a trained position."""

    def __init__(self, name: str, count: int, position: str) -> None:
        self.name = name
        super().__init__(f"{name} is NaN or infinite at {count} trained position(s), first at {position}")


def policy_loss(
    config: Loss,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    total: Total,
    mask: Tensor | None = None,
    trajectory_tokens: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    describe: Callable[[int], str] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """This part's share of the step's loss, and of its metrics.

    `old_logprobs`: as recorded at sampling, nats. `weights`: factor of a token's whole loss. `trajectory_tokens`: number of trained
    tokens of the trajectory that the token belongs to, for `trajectory_mean`. `reference_logprobs` and `entropy` are needed where
    their coefficient is above 0. `describe` names a flat position in an error.

    Metrics are sums over this part's trained tokens divided by `total.tokens` (add them over parts to get the step's mean):
    `policy_loss`, `kl` (k3, to the reference), `entropy`, `clip_low`, `clip_high` (fractions), `ratio`, `old_kl` (k3, to the
    sampling policy), `logprob_difference` (absolute); and `loss`, which adds up to the loss itself.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    logprobs = masked("logprobs", logprobs, mask, describe)
    old_logprobs = masked("old_logprobs", old_logprobs, mask, describe)
    advantages = masked("advantages", advantages, mask, describe)
    weights = masked("weights", weights, mask, describe)
    per_token, metrics = LOSSES[config.name](config, logprobs, old_logprobs, advantages)
    metrics = {"policy_loss": weights * per_token, **metrics}
    if config.kl > 0:
        if reference_logprobs is None:
            raise ValueError("loss.kl needs reference_logprobs")
        divergence = k3(logprobs, masked("reference_logprobs", reference_logprobs, mask, describe))
        per_token = per_token + config.kl * divergence
        metrics["kl"] = divergence
    if entropy is not None:
        entropy = masked("entropy", entropy, mask, describe)
        metrics["entropy"] = entropy
    if config.entropy > 0:
        if entropy is None:
            raise ValueError("loss.entropy needs entropy")
        per_token = per_token - config.entropy * entropy
    with torch.no_grad():
        metrics["old_kl"] = k3(logprobs, old_logprobs)
        metrics["logprob_difference"] = (logprobs - old_logprobs).abs()
    loss = reduce(weights * per_token, mask, config=config, total=total, trajectory_tokens=trajectory_tokens)
    shares = {name: float(_sum(value.detach(), mask)) / max(1, total.tokens) for name, value in metrics.items()}
    return loss, {"loss": float(loss.detach()), **shares}


def ppo_clip(config: Loss, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, and what to log of it per token."""
    ratio = _bounded(logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        low = (ratio < 1 - config.clip_low) & (advantages < 0)
        high = (ratio > 1 + config.clip_high) & (advantages > 0)
    return loss, {"ratio": ratio.detach(), "clip_low": low.to(ratio.dtype), "clip_high": high.to(ratio.dtype)}


LOSSES: dict[str, Callable[[Loss, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]] = {"ppo_clip": ppo_clip}
"""By the name in `train.loss.name`."""


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) on the policy's own samples: exp(d) - d - 1, d = reference - policy; at least 0."""
    difference = _bounded(reference_logprobs - logprobs)
    return difference.exp() - difference - 1


def reduce(values: Tensor, mask: Tensor, *, config: Loss, total: Total, trajectory_tokens: Tensor | None = None) -> Tensor:
    """Scalar share of the step's loss. `config.reduction`:

    `token_mean`: sum over tokens / number of trained tokens of the step. `trajectory_mean`: each trajectory's tokens are averaged, then the
    trajectories: sum of value / (trained tokens of its trajectory), / number of trajectories. `constant`: sum / `config.constant`.
    """
    if config.reduction == "trajectory_mean":
        if trajectory_tokens is None:
            raise ValueError("reduction trajectory_mean needs trajectory_tokens")
        values = values / torch.where(mask, trajectory_tokens, 1).clamp(min=1)
    return _sum(values, mask) / denominator(config, total)


def denominator(config: Loss, total: Total) -> float:
    """The one number that every part's sum is divided by. 1 where the step trains nothing, whose sum is 0."""
    if config.reduction == "constant":
        if config.constant is None:
            raise ValueError("reduction constant needs loss.constant")
        return config.constant
    return float(max(1, total.trajectories if config.reduction == "trajectory_mean" else total.tokens))


def masked(name: str, values: Tensor, mask: Tensor, describe: Callable[[int], str] | None = None) -> Tensor:
    """`values` with 0 where `mask` is false; raises `NotFinite` by `name` for what is not finite elsewhere."""
    values = torch.where(mask, values, torch.zeros_like(values))
    bad = ~torch.isfinite(values.detach())
    if bad.any():
        first = int(bad.flatten().nonzero()[0])
        raise NotFinite(name, int(bad.sum()), describe(first) if describe else f"index {first}")
    return values


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
