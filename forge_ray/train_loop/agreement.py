"""Do engine and trainer hold the same policy? Asked before every step, of tokens whose sampling weights the trainer still has.

mean |rollout − trainer logprob| over tokens of the current version, and over those of older versions under the weights of then
(`history`), must be numerical noise: 1e-6 in float32. More means stale or wrong weights in a replica, another template, other sampling
parameters, or a precision that was not meant; each of them silently spoils a run while the reward may still rise.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import nullcontext

import numpy as np
import torch

from forge_ray.errors import ForgeRayError
from forge_ray.train_loop.history import WeightHistory
from forge_ray.train_loop.part import Part, Passes
from forge_ray.train_loop.strategies.strategy import Strategy

ROWS = 16
"""Sequences per version and rank that are looked at."""


class LogprobMismatch(ForgeRayError):
    """Engine and trainer disagree about tokens whose weights are known."""

    def __init__(self, mean: float, bound: float, tokens: int, step: int, version: int, hint: str = "") -> None:
        super().__init__(
            f"step {step}: mean |rollout - trainer logprob| is {mean:.2e} over {tokens} tokens that version {version} sampled, above "
            f"train.logprob_bound = {bound:g}: engine and trainer do not hold the same policy "
            f"({hint or 'weights, template or sampling parameters'})"
        )


def remedy(engine_dtype: str, precision: str) -> str:
    """What to do where the engine samples in another precision than is trained in; "" where it does not."""
    same = {"float": "float32", "half": "float16"}.get(engine_dtype, engine_dtype) == precision
    if same and precision == "float32":
        return ""
    if same:
        return f"{precision} rounds on both sides: raise train.logprob_bound, or set train.precision=float32"
    return (
        f"the engine computes in policy.engine.dtype = {engine_dtype}, the trainer in train.precision = {precision}: leave "
        "policy.engine.dtype out, or raise train.logprob_bound"
    )


def check(
    strategy: Strategy, part: Part, step: int, *, bound: float, history: WeightHistory, passes: Passes, hint: str = "",
    unknown: Container[int] = (),
) -> dict[str, float]:  # fmt: skip
    """`{"logprob_diff", "checked_tokens"}` over all checked versions; `{"checked_tokens": 0}` where there is nothing to check.

    The weights are of version `step`. `unknown`: versions whose tokens may be of other weights than those that now have the number. Raises
    `LogprobMismatch`, which ends with `hint`, on every rank alike; the weights are unchanged.
    """
    total, count = 0.0, 0
    for version in (step, *history.versions()):
        if version in unknown:
            continue
        own = part.sampled_by(version, ROWS)
        if not passes.ranks.most(len(own.steps)):
            continue
        with history.as_of(version, strategy.own()) if version != step else nullcontext():
            logprobs = own.score(strategy.module, passes)
        # NaN says nothing of the weights: the loss stops at a recorded one by name, and leaves the update of one of the policy's out.
        sampled = (own.steps == version) & np.isfinite(own.old_logprobs) & ~np.isnan(logprobs)
        difference = np.abs(logprobs.astype(np.float64) - own.old_logprobs)[sampled].sum()
        summed, tokens = passes.ranks.sum(torch.tensor([difference, sampled.sum()], dtype=torch.float64)).tolist()
        if not tokens:
            continue
        if not summed / tokens <= bound:
            raise LogprobMismatch(summed / tokens, bound, int(tokens), step, version, hint)
        total, count = total + summed, count + int(tokens)
    return {"logprob_diff": total / count, "checked_tokens": count} if count else {"checked_tokens": 0}
