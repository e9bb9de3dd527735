"""Estimates from n rollouts of a task, c of which passed. All are unbiased, and all are means over tasks.

- `pass@k`: at least one of k rollouts passes, 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).
- `pass^k`: all of k rollouts pass, C(c, k) / C(n, k) (Yao et al. 2024, arXiv 2406.12045).
- `flip rate`: two rollouts of a task end differently, 2 c (n − c) / (n (n − 1)). It is what a rerun of the same policy changes.

A task with fewer than k rollouts says nothing about k and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb

Passed = Mapping[str, Sequence[bool]]
"""Task name → whether each of its rollouts passed."""


def at_least_one(n: int, c: int, k: int) -> float:
    """pass@k of one task. Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    _check(n, c, k)
    return 1 - comb(n - c, k) / comb(n, k)


def all_of(n: int, c: int, k: int) -> float:
    """pass^k of one task. Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    _check(n, c, k)
    return comb(c, k) / comb(n, k)


def flips(n: int, c: int, k: int = 2) -> float:
    """Flip rate of one task. Raises ValueError for n < 2; `k` is 2."""
    _check(n, c, k)
    return 2 * c * (n - c) / (n * (n - 1))


Estimate = Callable[[int, int, int], float]


def by_task(passed: Passed, estimate: Estimate, k: int) -> dict[str, float]:
    """The estimate of each task that has at least `k` rollouts."""
    return {task: estimate(len(samples), sum(samples), k) for task, samples in passed.items() if len(samples) >= k}


def powers(parts: Iterable[Passed]) -> list[int]:
    """1, 2, 4, … up to the number of rollouts that every task of every part has, which is the last one."""
    most = min((len(samples) for passed in parts for samples in passed.values() if samples), default=0)
    found = [k for k in (1 << power for power in range(most.bit_length())) if k <= most]
    return found if not found or found[-1] == most else [*found, most]


def _check(n: int, c: int, k: int) -> None:
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"{c} of {n} rollouts passed: no estimate for k = {k}")
