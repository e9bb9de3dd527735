"""Advantages over trajectories: one number per rollout goes in (`credit.trajectory_reward`), one comes out.

How many samples or tokens a rollout became plays no part. Statistics are over the valid rollouts (`rollout.usable`) alone. A group that
says nothing (fewer than two valid numbers, or all equal) is *degenerate*: its advantages are 0 and `trained` is false, so that nothing
of it reaches the loss, its KL included.

An estimator is a pure function of the valid numbers of the step's groups, by the name in `train.advantage.name`. With r_i of a group of
n, m its mean and s its standard deviation (n - 1):

    grpo                   (r_i - m) / (s + eps)             DeepSeekMath, arXiv 2402.03300, section 4.1; n - 1 as OpenForgeRL's code
    dr_grpo                r_i - m                           Dr.GRPO, arXiv 2503.20783, section 3.2
    rloo                   r_i - mean of the others          RLOO, arXiv 2402.14740: n / (n - 1) times dr_grpo's
    reinforce_pp           (r_i - M) / (S + eps)             REINFORCE++, arXiv 2501.03262; M, S over the rollouts of the whole step
    reinforce_pp_baseline  (r_i - m) / (S' + eps)            the same, -baseline variant; S' of r - m over the step's trained rollouts
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge_ray.rollout import usable, usable_of

EPSILON = 1e-6
"""Added to a standard deviation, in units of reward."""

Estimator = Callable[[list[list[float]], float], list[list[float]]]


@dataclass(frozen=True)
class GroupAdvantage:
    """Per trajectory, in the order given."""

    advantages: list[float]
    trained: list[bool]
    """False: an invalid number (not `rollout.usable`), or every one of a degenerate group."""
    mean: float | None
    """Of the group; None without a valid number."""
    std: float | None
    """ddof 1; None with fewer than two valid numbers."""

    @property
    def degenerate(self) -> bool:
        return not any(self.trained)


def group_advantages(groups: Sequence[Sequence[float | None]], name: str = "grpo", *, epsilon: float = EPSILON) -> list[GroupAdvantage]:
    """The advantages of a step's groups, by the estimator `name`."""
    valid = [usable_of(group) for group in groups]
    if name in STEP_WIDE:
        told = [bool(numbers) and _spread([number for group in valid for number in group]) for numbers in valid]
    else:
        told = [_spread(numbers) for numbers in valid]
    values = iter(ESTIMATORS[name]([numbers for numbers, speaks in zip(valid, told, strict=True) if speaks], epsilon))
    found = []
    for group, numbers, speaks in zip(groups, valid, told, strict=True):
        mean = statistics.fmean(numbers) if numbers else None
        std = statistics.stdev(numbers) if len(numbers) > 1 else None
        trained = [speaks and usable(number) for number in group]
        of_group = iter(next(values)) if speaks else iter(())
        found.append(GroupAdvantage([next(of_group) if ok else 0.0 for ok in trained], trained, mean, std))
    return found


def group_advantage(rewards: Sequence[float | None], name: str = "grpo", *, epsilon: float = EPSILON) -> GroupAdvantage:
    """Of one group that is a whole step."""
    return group_advantages([rewards], name, epsilon=epsilon)[0]


def grpo(groups: list[list[float]], epsilon: float) -> list[list[float]]:
    return [[value / (statistics.stdev(group) + epsilon) for value in _centred(group)] for group in groups]


def dr_grpo(groups: list[list[float]], epsilon: float) -> list[list[float]]:
    return [_centred(group) for group in groups]


def rloo(groups: list[list[float]], epsilon: float) -> list[list[float]]:
    return [[len(group) / (len(group) - 1) * value for value in _centred(group)] for group in groups]


def reinforce_pp(groups: list[list[float]], epsilon: float) -> list[list[float]]:
    step = [number for group in groups for number in group]
    if not step:
        return []
    mean, std = statistics.fmean(step), statistics.stdev(step)
    return [[(number - mean) / (std + epsilon) for number in group] for group in groups]


def reinforce_pp_baseline(groups: list[list[float]], epsilon: float) -> list[list[float]]:
    centred = [_centred(group) for group in groups]
    step = [value for group in centred for value in group]
    std = statistics.stdev(step) if step else 0.0
    return [[value / (std + epsilon) for value in group] for group in centred]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
"""By the name in `train.advantage.name`. Each is given groups that say something: two numbers that differ, or a step that has them."""

STEP_WIDE = frozenset({"reinforce_pp"})
"""Estimators whose baseline is the step's: a group of equal rewards still says something beside others."""


def _centred(group: list[float]) -> list[float]:
    mean = statistics.fmean(group)
    return [number - mean for number in group]


def _spread(numbers: list[float]) -> bool:
    # Equal up to rounding is equal: dividing 1e-17 by itself would make a full-sized advantage of it.
    return len(numbers) > 1 and max(numbers) - min(numbers) > 1e-9 * max(1.0, *(abs(number) for number in numbers))
