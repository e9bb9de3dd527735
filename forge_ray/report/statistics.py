"""Means and shares over tasks with 95 % intervals, without scipy.

The rollouts of one task are not independent (an easy task passes eight times of eight), so a binomial interval over all of them would be
far too narrow. Every estimate is a mean of one value per task, and its variance is taken between tasks, which count as a random sample of
their family.

`share` is for values in [0, 1]: a Wilson score interval with the *effective* number of samples (Korn and Graubard 1998; Dean and Pagano
2015):

    v     = variance of the tasks' values (ddof 1) / tasks
    n_eff = p (1 − p) / v, at most the real number of rollouts; all tasks alike (v = 0): the number of tasks
    n_adj = n_eff · (z / t)²   with t the Student quantile for tasks − 1 degrees of freedom

`mean` is for other values: Student's interval.

Resampling the tasks instead (`evaluation.resampling`) misses where tasks are all alike, since resamples then are too: of 6 easy tasks with
4 rollouts each, it holds the truth of pass@4 in 8 of 100 cases, `share` in 92 (simulated in tests/unit/test_evaluation_statistics.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

Z = NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


class PassRate(BaseModel):
    """pass@1 with its 95 % interval."""

    model_config = ConfigDict(serialize_by_alias=True)

    pass_at_1: float = Field(validation_alias=AliasChoices("pass@1", "pass_at_1"), serialization_alias="pass@1")
    low: float
    high: float
    n: int
    """Rollouts with a reward."""
    tasks: int

    def __str__(self) -> str:
        return f"{self.pass_at_1:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.tasks} tasks, {self.n} rollouts)"


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees, else Abramowitz and Stegun 26.7.5 (error below 0.01 from 3 on)."""
    if freedom < 1:
        raise ValueError("at least one degree of freedom")
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, v = Z, float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, start=1))


def wilson(p: float, n: float) -> tuple[float, float]:
    """95 % Wilson score interval of a share `p` of `n` (may be fractional) independent trials."""
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return max(0.0, min(centre - half, p)), min(1.0, max(centre + half, p))


def pass_rate(passed: Mapping[str, Sequence[bool]]) -> PassRate | None:
    """pass@1 of `{task: [passed, …]}`; None without a single sample. Tasks without a sample are left out."""
    means = [sum(samples) / len(samples) for samples in passed.values() if len(samples)]
    count = sum(len(samples) for samples in passed.values())
    found = share(means, count)
    return None if found is None else PassRate(pass_at_1=found.mean, low=found.low, high=found.high, n=count, tasks=len(means))


def share(values: Sequence[float], rollouts: int) -> Interval | None:
    """Mean of one value in [0, 1] per task, of so many rollouts in all; None without a task. One task tells nothing of others."""
    tasks = len(values)
    if not tasks:
        return None
    p = sum(values) / tasks
    if tasks == 1:
        return Interval(p, 0.0, 1.0)
    variance = sum((value - p) ** 2 for value in values) / (tasks - 1) / tasks
    effective = min(p * (1 - p) / variance, rollouts) if variance > 0 else float(tasks)
    return Interval(p, *wilson(p, effective * (Z / student_quantile(tasks - 1)) ** 2))


def mean(values: Sequence[float], least: float, most: float) -> Interval | None:
    """Mean of one value in [least, most] per task; None without a task. Tasks that are all alike give an interval of no width."""
    middle, half = mean_ci(values)
    if middle is None:
        return None
    return Interval(middle, *(least, most) if half is None else (max(middle - half, least), min(middle + half, most)))


def mean_ci(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Mean and half width of its 95 % interval; values that are not finite are left out. None where it cannot be told."""
    numbers = [value for value in values if math.isfinite(value)]
    if not numbers:
        return None, None
    # In units of a power of two about the largest of them: exact, and no sum or square of numbers near a double's end overflows.
    unit = 2.0 ** max(0, math.frexp(max(map(abs, numbers)))[1] - 500)
    numbers = [value / unit for value in numbers]
    middle = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return middle * unit, None
    variance = math.fsum((value - middle) ** 2 for value in numbers) / (len(numbers) - 1)
    half = student_quantile(len(numbers) - 1) * math.sqrt(variance / len(numbers)) * unit
    return middle * unit, half if math.isfinite(half) else None
