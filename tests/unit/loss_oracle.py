"""The losses a second time, from their formulas: float64, plain loops over rollouts, calls and tokens, gradients by hand. No tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from typing import Any

from forge_ray.config import Loss


@dataclass
class Token:
    logprob: float
    rollout: float
    proximal: float
    reference: float
    teacher: float
    entropy: float
    advantage: float
    weight: float
    staleness: int
    position: int


Call = list[Token]
Step = list[list[Call]]
"""Rollouts of calls of tokens."""


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(config: Loss, ratio: float, advantage: float) -> tuple[float, float]:
    """PPO's clipped surrogate as a loss, and its derivative by the log of the ratio."""
    straight, cut = -ratio * advantage, -clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage
    value, slope = (straight, straight) if straight >= cut else (cut, 0.0)
    if config.clip_dual is not None and advantage < 0 and value > -config.clip_dual * advantage:
        value, slope = -config.clip_dual * advantage, 0.0
    return value, slope


def kl(kind: str, logprob: float, other: float) -> tuple[float, float]:
    """Estimate of KL(policy || other), and its derivative by the policy's log-probability."""
    gap = logprob - other
    if kind == "k1":
        return gap, 1.0
    return (gap * gap / 2, gap) if kind == "k2" else (exp(-gap) - 1 + gap, 1 - exp(-gap))


def objective(config: Loss, call: Call) -> Iterator[tuple[float, float]]:
    """Loss of each token of a call, and its derivative by the token's log-probability."""
    recomputed = config.old_policy == "recomputed"
    old = [t.proximal if recomputed else t.rollout for t in call]
    ratios = [exp(t.logprob - o) for t, o in zip(call, old, strict=True)]
    distils = config.distillation
    for index, token in enumerate(call):
        advantage = 0.0 if config.name == "distillation" else token.advantage
        if distils is not None and distils.form == "advantage":
            advantage += distils.coefficient * (token.teacher - old[index])
        ratio = ratios[index]
        match config.name:
            case "grpo" | "dr_grpo" | "dapo":
                yield surrogate(config, ratio, advantage)
            case "gspo":
                together = 1.0
                for one in ratios:
                    together *= one
                yield surrogate(config, together ** (1 / len(call)), advantage)
            case "cispo":
                factor = clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage
                yield -factor * token.logprob, -factor
            case "rloo":
                yield -advantage * token.logprob, -advantage
            case "reinforce_pp":
                for later, other in zip(call[index:], old[index:], strict=True):
                    discount = config.kl_discount ** (later.position - token.position)
                    advantage -= config.kl * discount * kl(config.kl_kind, other, later.reference)[0]
                yield surrogate(config, ratio, advantage)
            case "distillation":
                yield (-ratio * advantage, -ratio * advantage) if distils is not None and distils.form == "advantage" else (0.0, 0.0)
            case "sft":
                yield (-token.logprob, -1.0) if advantage > 0 else (0.0, 0.0)


def importance(config: Loss, call: Call) -> list[float]:
    settings = config.importance
    if settings.level == "none":
        return [1.0] * len(call)
    recomputed = config.old_policy == "recomputed"
    own = [exp((t.proximal if config.has_ratio and recomputed else t.logprob) - t.rollout) for t in call]
    if settings.level == "sequence":
        product = 1.0
        for one in own:
            product *= one
        own = [product] * len(call)
    if settings.mode == "truncate":
        return [min(one, settings.cap) for one in own]
    return [one if settings.floor <= one <= settings.cap else 0.0 for one in own]


def kept(config: Loss, call: Call, advantages: list[float]) -> list[bool]:
    settings = config.stale
    far = (
        settings.kl is not None
        and sum(advantages) < 0
        and sum(t.rollout - t.logprob for t in call) / len(call) > settings.kl
    )  # fmt: skip
    return [not far and (settings.versions is None or t.staleness <= settings.versions) for t in call]


def advantages(config: Loss, call: Call) -> list[float]:
    recomputed = config.old_policy == "recomputed"
    made = [0.0 if config.name == "distillation" else t.advantage for t in call]
    if config.distillation is not None and config.distillation.form == "advantage":
        made = [
            a + config.distillation.coefficient * (t.teacher - (t.proximal if recomputed else t.rollout))
            for a, t in zip(made, call, strict=True)
        ]
    return made


def loss(config: Loss, step: Step) -> tuple[float, list[list[list[float]]], dict[str, Any]]:
    """The step's loss, its derivative by every log-probability, and some metrics."""
    tokens = sum(len(call) for rollout in step for call in rollout)
    calls = sum(len(rollout) for rollout in step)
    value, gradient = 0.0, []
    most, capped, stale = 0.0, 0, 0
    for rollout in step:
        of_rollout = sum(len(call) for call in rollout)
        gradient.append([])
        for call in rollout:
            divisor = {
                "token_mean": tokens,
                "trajectory_mean": of_rollout * len(step),
                "sequence_mean": len(call) * calls,
                "trajectory_sum": len(step),
                "constant": config.constant,
            }[config.reduction]
            assert divisor is not None
            slopes = []
            terms = zip(call, objective(config, call), importance(config, call), kept(config, call, advantages(config, call)), strict=True)
            for token, (own, slope), corrected, keep in terms:
                own, slope = corrected * own, corrected * slope
                if config.kl > 0 and config.name != "reinforce_pp":
                    more, steeper = kl(config.kl_kind, token.logprob, token.reference)
                    own, slope = own + config.kl * more, slope + config.kl * steeper
                if config.distillation is not None and config.distillation.form == "loss":
                    more, steeper = kl(config.distillation.kind, token.logprob, token.teacher)
                    own, slope = own + config.distillation.coefficient * more, slope + config.distillation.coefficient * steeper
                own -= config.entropy * token.entropy
                factor = token.weight * keep / divisor
                value += factor * own
                slopes.append(factor * slope)
                stale += not keep
            gradient[-1].append(slopes)
            if config.importance.level != "none":
                free = config.model_copy(
                    update={"importance": config.importance.model_copy(update={"mode": "truncate", "cap": float("inf")})}
                )
                raw = importance(free, call)
                most = max([most, *raw])
                low = config.importance.floor if config.importance.mode == "mask" else 0.0
                capped += sum(not low <= one <= config.importance.cap for one in raw)
    return value, gradient, {"importance_max": most, "importance_capped": capped / max(1, tokens), "stale_masked": stale / max(1, tokens)}
