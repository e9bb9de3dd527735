"""95 % intervals by bootstrap over tasks, for who asks for them (`forge-ray eval --bootstrap`).

Rollouts of one task are not independent, so tasks are drawn with replacement and each keeps its own value (the cluster bootstrap). Plain
percentiles are too narrow for few tasks, so they are taken further out, as Student's t and the n − 1 of a variance would have it: the
expanded percentile interval of Hesterberg 2015, arXiv 1411.5279. Where every task has one and the same value each resample looks alike and
the interval has no width: that is why `statistics` has the ones that are used unasked. Resamples are seeded: the same evaluation gives the
same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from forge_ray.report.statistics import Interval, student_quantile

RESAMPLES = 10_000
CHUNK = 2**22
"""Values drawn at a time."""


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval | None:
    """Mean of one value per task with its expanded percentile interval; None without a task. One task gives an interval of no width."""
    if not len(values):
        return None
    tail = _tail(len(values))
    low, high = np.quantile(_means(np.asarray(values, np.float64), seed), (tail, 1 - tail))
    return Interval(float(np.mean(values)), float(low), float(high))


def _means(values: np.ndarray, seed: int) -> np.ndarray:
    """Means of so many values drawn with replacement; float64, (RESAMPLES,)."""
    random, count = np.random.default_rng(seed), len(values)
    step = max(1, CHUNK // count)
    starts = range(0, RESAMPLES, step)
    return np.concatenate([values[random.integers(0, count, (min(step, RESAMPLES - start), count))].mean(1) for start in starts])


def _tail(count: int) -> float:
    """Share of the resamples that an interval leaves out on either side."""
    if count < 2:
        return 0.025
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_quantile(count - 1))
