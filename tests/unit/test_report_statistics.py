"""Intervals against hand-computed and tabulated numbers, and their coverage by simulation."""

from __future__ import annotations

import math
import random

import pytest

from forge_ray.report.statistics import PassRate, mean_ci, pass_rate, student_quantile, wilson


@pytest.mark.parametrize(
    ("freedom", "tabulated"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (23, 2.069), (100, 1.984)]
)
def test_student_quantile(freedom: int, tabulated: float) -> None:
    assert student_quantile(freedom) == pytest.approx(tabulated, abs=0.011 if freedom == 3 else 0.003)


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, table I, method 3: 81/263 and 15/148 and 0/20.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_mean_ci_by_hand() -> None:
    mean, half = mean_ci([1.0, 0.0, 0.0, 0.0])
    assert mean == 0.25 and half == pytest.approx(3.182 * 0.5 / 2, abs=0.006)
    assert mean_ci([]) == (None, None) and mean_ci([2.0]) == (2.0, None)
    assert mean_ci([1.0, math.nan, 1.0]) == (1.0, 0.0)
    assert mean_ci([1e308] * 4) == (1e308, 0.0) and mean_ci([1.7e308, -1.7e308]) == (0.0, None)
    assert half is not None and mean_ci([1e300, 0.0, 0.0, 0.0]) == (0.25e300, pytest.approx(half * 1e300))
    assert mean_ci([1e-300, 0.0, 0.0, 0.0])[0] == 0.25e-300


def test_samples_of_one_task_are_not_independent() -> None:
    alike = pass_rate({f"t{i}": [i % 2 == 0] * 8 for i in range(24)})  # a task passes always or never
    mixed = pass_rate({f"t{i}": [sample % 2 == 0 for sample in range(8)] for i in range(24)})  # every task passes half the time
    assert alike and mixed and alike.pass_at_1 == mixed.pass_at_1 == 0.5 and alike.n == mixed.n == 192
    naive = wilson(0.5, 192)
    assert alike.high - alike.low > 2 * (naive[1] - naive[0]), "192 samples that say what 24 would"
    only_tasks = wilson(0.5, 23 * (1.96 / student_quantile(23)) ** 2)
    assert (alike.low, alike.high) == pytest.approx(only_tasks, abs=2e-3)


def test_the_edges_are_not_certain() -> None:
    for passed in (True, False):
        rate = pass_rate({f"t{i}": [passed] * 8 for i in range(24)})
        assert rate and rate.pass_at_1 == float(passed)
        assert (rate.low, rate.high) == pytest.approx((0.845, 1.0) if passed else (0.0, 0.155), abs=0.01)
    single = pass_rate({"t": [True, True]})
    assert single and (single.low, single.high) == (0.0, 1.0)
    assert pass_rate({}) is None and pass_rate({"t": []}) is None


def test_tasks_weigh_alike_whatever_their_samples() -> None:
    rate = pass_rate({"a": [True], "b": [False] * 9})
    assert rate and rate.pass_at_1 == 0.5 and rate.n == 10 and rate.tasks == 2


@pytest.mark.parametrize("spread", [0.5, 2.0, 20.0])
def test_coverage(spread: float) -> None:
    """24 tasks × 8 samples, task difficulty Beta-distributed with mean 0.8: the interval holds the truth about 95 times in 100."""
    source, tries, held = random.Random(7), 1500, 0
    for _ in range(tries):
        tasks = {}
        for number in range(24):
            p = source.betavariate(0.8 * spread, 0.2 * spread)
            tasks[str(number)] = [source.random() < p for _ in range(8)]
        rate = pass_rate(tasks)
        assert rate
        held += rate.low <= 0.8 <= rate.high
    assert 0.925 <= held / tries <= 0.985


def test_the_json_says_pass_at_1() -> None:
    rate = PassRate(pass_at_1=0.5, low=0.25, high=0.75, n=8, tasks=2)
    assert rate.model_dump() == {"pass@1": 0.5, "low": 0.25, "high": 0.75, "n": 8, "tasks": 2}
    assert PassRate.model_validate(rate.model_dump()) == rate
