"""Means and pass rates with 95 % intervals, without scipy.

`pass_rate` is pass@1 over tasks × samples. The samples of one task are not independent (an easy task passes eight times of eight), so
a binomial interval over all of them would be far too narrow. The estimate is the mean of the task means, its variance is taken between
tasks, and a Wilson score interval is drawn with the *effective* number of samples (Korn and Graubard 1998; Dean and Pagano 2015):

    v     = variance of the task means (ddof 1) / tasks
    n_eff = p (1 − p) / v, at most the real number of samples; all tasks alike (v = 0): the number of tasks
    n_adj = n_eff · (z / t)²   with t the Student quantile for tasks − 1 degrees of freedom

Unlike a bootstrap it stays honest at 0 and 1, where every resample looks alike. The tasks count as a random sample of their family.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

Z = NormalDist().inv_cdf(0.975)


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
    count, tasks = sum(len(samples) for samples in passed.values()), len(means)
    if not tasks:
        return None
    p = sum(means) / tasks
    if tasks == 1:
        return PassRate(pass_at_1=p, low=0.0, high=1.0, n=count, tasks=1)
    variance = sum((mean - p) ** 2 for mean in means) / (tasks - 1) / tasks
    effective = min(p * (1 - p) / variance, count) if variance > 0 else float(tasks)
    low, high = wilson(p, effective * (Z / student_quantile(tasks - 1)) ** 2)
    return PassRate(pass_at_1=p, low=low, high=high, n=count, tasks=tasks)


def mean_ci(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Mean and half width of its 95 % interval; values that are not finite are left out. None where it cannot be told."""
    numbers = [value for value in values if math.isfinite(value)]
    if not numbers:
        return None, None
    # In units of a power of two about the largest of them: exact, and no sum or square of numbers near a double's end overflows.
    unit = 2.0 ** max(0, math.frexp(max(map(abs, numbers)))[1] - 500)
    numbers = [value / unit for value in numbers]
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return mean * unit, None
    variance = math.fsum((value - mean) ** 2 for value in numbers) / (len(numbers) - 1)
    half = student_quantile(len(numbers) - 1) * math.sqrt(variance / len(numbers)) * unit
    return mean * unit, half if math.isfinite(half) else None
