"""Group-relative advantage (GRPO), over trajectories.

One number per trajectory, its terminal reward; mean and standard deviation (n - 1) over the valid trajectories of the group. How many
samples or tokens a trajectory became plays no part. A group that says nothing (fewer than two valid rewards, or all equal) is
*degenerate*: its advantages are 0 and `trained` is false, so that nothing of it reaches the loss, its KL included.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from forge_ray.rollout import usable, usable_of

EPSILON = 1e-6
"""Added to the standard deviation, in units of reward."""


@dataclass(frozen=True)
class GroupAdvantage:
    """Per trajectory, in the order given."""

    advantages: list[float]
    trained: list[bool]
    """False: an invalid reward (not `rollout.usable`), or every one of a degenerate group."""
    mean: float | None
    """Baseline; None without a valid reward."""
    std: float | None
    """ddof 1; None with fewer than two valid rewards."""

    @property
    def degenerate(self) -> bool:
        return not any(self.trained)


def group_advantage(rewards: Sequence[float | None], *, normalize_std: bool = True, epsilon: float = EPSILON) -> GroupAdvantage:
    """Advantage (r_i - mean) / (std + epsilon) of each trajectory; without `normalize_std` the centred reward alone."""
    valid = usable_of(rewards)
    mean = statistics.fmean(valid) if valid else None
    std = statistics.stdev(valid) if len(valid) > 1 else None
    # Equal up to rounding is equal: dividing 1e-17 by itself would make a full-sized advantage of it.
    spread = len(valid) > 1 and max(valid) - min(valid) > 1e-9 * max(1.0, *(abs(reward) for reward in valid))
    if mean is None or std is None or not spread:
        return GroupAdvantage([0.0] * len(rewards), [False] * len(rewards), mean, std)
    scale = std + epsilon if normalize_std else 1.0
    trained = [usable(reward) for reward in rewards]
    advantages = [(reward - mean) / scale if ok and reward is not None else 0.0 for reward, ok in zip(rewards, trained, strict=True)]
    return GroupAdvantage(advantages, trained, mean, std)
