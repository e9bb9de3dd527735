"""95 % intervals by bootstrap over tasks.

Rollouts of one task are not independent, so tasks are drawn with replacement and each keeps its own value (the cluster bootstrap). Plain
percentiles are too narrow for few tasks (simulated: they hold the truth in 88 % of cases for 6 tasks, 93 % for 12). So they are taken
further out, as Student's t and the n − 1 of a variance would have it: the expanded percentile interval of Hesterberg 2015, arXiv 1411.5279
(91 % and 95 %). Where every task has one and the same value each resample looks alike, and the interval has no width: `PassRate`, which
does not resample, says more there. Resamples are seeded: the same evaluation gives the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from forge_ray.report.statistics import student_quantile

RESAMPLES = 10_000
CHUNK = 2**22
"""Values drawn at a time."""


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def resampled_means(values: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Means of `resamples` draws with replacement of len(values) values; float64, (resamples,)."""
    numbers = np.asarray(values, np.float64)
    random = np.random.default_rng(seed)
    step = max(1, CHUNK // max(1, len(numbers)))
    parts = [
        numbers[random.integers(0, len(numbers), (min(step, resamples - start), len(numbers)))].mean(1)
        for start in range(0, resamples, step)
    ]
    return np.concatenate(parts)


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval | None:
    """Mean of one value per task with its expanded percentile interval; None without a task. One task gives an interval of no width."""
    if not len(values):
        return None
    tail = _tail(len(values))
    low, high = np.quantile(resampled_means(values, seed=seed), (tail, 1 - tail))
    return Interval(float(np.mean(values)), float(low), float(high))


def _tail(count: int) -> float:
    """Share of the resamples that an interval leaves out on either side."""
    if count < 2:
        return 0.025
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_quantile(count - 1))
