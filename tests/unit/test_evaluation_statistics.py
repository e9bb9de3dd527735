"""pass@k, pass^k, flips, intervals and the paired test against what counting and simulation give."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.cli.eval import stored
from forge_ray.errors import UserError
from forge_ray.outcome import Outcome
from forge_ray.report.evaluation import text
from forge_ray.report.evaluation.comparison import compare, compare_harnesses, sign_flip
from forge_ray.report.evaluation.passes import all_of, at_least_one, by_task, flips, powers
from forge_ray.report.evaluation.resampling import bootstrap
from forge_ray.report.evaluation.summary import outcomes_by_task, summarize
from forge_ray.report.statistics import mean, share
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_estimates_count_subsets(given_: tuple[int, int, int]) -> None:
    """Over all ways to pick k of the n rollouts."""
    n, c, k = given_
    picks = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert at_least_one(n, c, k) == pytest.approx(float(Fraction(sum(any(pick) for pick in picks), len(picks))))
    assert all_of(n, c, k) == pytest.approx(float(Fraction(sum(all(pick) for pick in picks), len(picks))))
    if n >= 2:
        pairs = list(itertools.combinations([True] * c + [False] * (n - c), 2))
        assert flips(n, c) == pytest.approx(sum(one != other for one, other in pairs) / len(pairs))


def test_known_values() -> None:
    assert at_least_one(5, 2, 3) == pytest.approx(0.9) and all_of(5, 3, 2) == pytest.approx(0.3) and flips(4, 2) == pytest.approx(2 / 3)
    for wrong in ((3, 1, 4), (3, 4, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="no estimate"):
            at_least_one(*wrong)


def test_tasks_without_enough_rollouts_are_left_out() -> None:
    passed = {"a": [True, False, True, True], "b": [False, False], "c": []}
    assert by_task(passed, at_least_one, 1) == {"a": 0.75, "b": 0.0} and by_task(passed, all_of, 4) == {"a": 0.0}
    assert powers([passed]) == [1, 2] and powers([{"a": [True] * 6}]) == [1, 2, 4, 6] and powers([{}]) == []


@pytest.mark.parametrize("tasks", [6, 24])
@pytest.mark.parametrize("difficulty", [(2, 2), (4, 1)])
def test_the_intervals_of_estimates_cover(difficulty: tuple[float, float], tasks: int) -> None:
    """Of 95 % intervals about 95 % hold the truth, also with few tasks (of differing difficulty, 4 rollouts), also near 0 and 1, where
    tasks are drawn that are all alike."""
    random, truth = np.random.default_rng(1), np.random.default_rng(2).beta(*difficulty, 1_000_000)
    sought = {"at_least_one": (at_least_one, 1 - (1 - truth) ** 4), "all_of": (all_of, truth**4), "flips": (flips, 2 * truth * (1 - truth))}
    hits = dict.fromkeys(sought, 0)
    for _ in range(400):
        passes = random.binomial(4, random.beta(*difficulty, tasks))
        for name, (estimate, right) in sought.items():
            interval = share([estimate(4, int(c), 2 if name == "flips" else 4) for c in passes], 4 * tasks)
            assert interval is not None and 0 <= interval.low <= interval.mean <= interval.high <= 1
            hits[name] += bool(interval.low <= right.mean() <= interval.high)
    assert min(hits.values()) >= 368, hits


@pytest.mark.parametrize("tasks", [6, 30])
def test_the_bootstrap_covers_a_share_of_passes(tasks: int) -> None:
    random, hits = np.random.default_rng(1), 0
    for _ in range(400):
        shares = random.binomial(4, random.beta(2, 2, tasks)) / 4
        interval = bootstrap(shares.tolist())
        assert interval is not None and interval.low <= interval.mean <= interval.high
        hits += interval.low <= 0.5 <= interval.high
    assert 356 <= hits <= 396
    assert bootstrap([]) is None and bootstrap([0.5]) == (0.5, 0.5, 0.5) and bootstrap([0.1, 0.9]) == bootstrap([0.1, 0.9])


def test_the_bootstrap_misses_where_tasks_are_all_alike() -> None:
    """Which is why it has to be asked for."""
    random, truth, hits = np.random.default_rng(1), 1 - (1 - np.random.default_rng(2).beta(4, 1, 1_000_000)) ** 4, [0, 0]
    for _ in range(400):
        values = [at_least_one(4, int(c), 4) for c in random.binomial(4, random.beta(4, 1, 6))]
        for number, interval in enumerate((bootstrap(values), share(values, 24))):
            assert interval is not None
            hits[number] += bool(interval.low <= truth.mean() <= interval.high)
    assert hits[0] <= 0.1 * 400 and hits[1] >= 0.9 * 400


@pytest.mark.parametrize("tasks", [4, 6, 24])
def test_the_intervals_of_differences_cover(tasks: int) -> None:
    random, hits = np.random.default_rng(1), 0
    for _ in range(400):
        there = random.beta(2, 3, tasks)
        here = there + 0.2 * random.random(tasks) * (1 - there)
        differences = (random.binomial(4, here) - random.binomial(4, there)) / 4
        interval = mean(differences.tolist(), -1.0, 1.0)
        assert interval is not None and -1 <= interval.low <= interval.mean <= interval.high <= 1
        hits += interval.low <= 0.06 <= interval.high
    assert 364 <= hits <= 396, hits


def test_what_one_task_says_of_others_is_nothing() -> None:
    assert share([0.5], 4) == (0.5, 0.0, 1.0) and mean([0.5], -1.0, 1.0) == (0.5, -1.0, 1.0)
    assert share([], 0) is None and mean([], 0.0, 1.0) is None


def test_sign_flips_of_small_samples_are_exact() -> None:
    assert sign_flip(np.array([1.0, 1.0, 1.0])) == 0.25 and sign_flip(np.array([1.0, -1.0])) == 1.0 and sign_flip(np.zeros(5)) == 1.0
    assert sign_flip(np.array([0.5, 0.25, 0.0, 0.0])) == 0.5, "tasks without a difference say nothing"
    assert sign_flip(np.array([0.1] * 3 + [0.2] * 2)) == pytest.approx(2 / 32)


def test_sign_flips_of_large_samples() -> None:
    """p is about uniform where nothing differs, and small where something does."""
    random = np.random.default_rng(2)
    values = [sign_flip(random.normal(0, 1, 40)) for _ in range(100)]
    assert 0.35 < float(np.mean(values)) < 0.65 and min(values) > 0
    assert sign_flip(random.normal(0.8, 1, 40)) < 0.001


def test_two_evaluations() -> None:
    here = {f"t{number}": [True, True, False, True] for number in range(10)} | {"only-here": [True]}
    there = {f"t{number}": [True, False, False, number % 2 == 0] for number in range(10)} | {"only-there": [False], "none": []}
    found = compare(here, there)
    assert found is not None and (found.tasks, found.better, found.worse) == (10, 10, 0)
    assert (found.here, found.there) == (0.75, pytest.approx(0.375)) and found.difference.mean == pytest.approx(0.375)
    assert found.difference.low > 0.2 and found.p == pytest.approx(2 / 1024)
    assert "0.750 against 0.375 on 10 tasks: +0.375" in str(found)
    assert compare({"a": [True]}, {"b": [True]}) is None
    same = compare(here, here)
    assert same is not None and same.p == 1.0


def rated(task: str, harness: str, sample: int, reward: float, directory: Path) -> RolloutRecord:
    key = f"eval-after-{task}-{harness}-{sample}"
    return RolloutRecord(
        id=f"{key}.0", key=key, purpose="eval", task=str(directory / task), task_name=task, harness=harness, group=None, attempt=0,
        outcome=Outcome.OK, detail="", reward=reward,
    )  # fmt: skip


def test_an_evaluation_by_harness_and_kind(tmp_path: Path) -> None:
    for task, kind in (("a1", "add"), ("a2", "add"), ("b1", "find")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "task.toml").write_text(f'[metadata]\nfamily = "{kind}"\n')
    records = [
        rated(task, harness, sample, float(sample < passes), tmp_path)
        for task, harness, passes in (("a1", "x", 4), ("a2", "x", 2), ("b1", "x", 0), ("a1", "y", 4), ("a2", "y", 4), ("b1", "y", 1))
        for sample in range(4)
    ]
    found = summarize(records)
    assert (
        found is not None and found.whole.rate.n == 24 and list(found.by_harness) == ["x", "y"] and list(found.by_kind) == ["add", "find"]
    )
    x = found.by_harness["x"]
    assert x.rate.pass_at_1 == 0.5 and {k: round(i.mean, 3) for k, i in x.at_least_one.items()} == {1: 0.5, 2: 0.611, 4: 0.667}
    assert {k: round(i.mean, 3) for k, i in x.all_of.items()} == {1: 0.5, 2: 0.389, 4: 0.333}
    assert x.flips is not None and x.flips.mean == pytest.approx((0 + 2 / 3 + 0) / 3)
    assert found.by_kind["find"].rate.pass_at_1 == 0.125
    assert outcomes_by_task(records)["x"]["a2"] == [True, True, False, False]
    assert found.whole.all_of[1] == share([1.0, 0.75, 0.125], 24), "what two harnesses make of a task is one value of it"
    assert found.whole.at_least_one[1] == (found.whole.rate.pass_at_1, found.whole.rate.low, found.whole.rate.high), "it is pass@1"
    numbers = found.numbers()
    assert numbers["pass_at_1"] == pytest.approx(0.625) and numbers["harnesses"]["x"]["pass_all_k"] == pytest.approx(1 / 3)
    assert numbers["kinds"]["find"] | {"low": 0, "high": 0} == {
        "pass_at_1": 0.125, "low": 0, "high": 0, "rollouts": 8, "tasks": 1, "k": 4, "pass_at_k": 0.5, "pass_all_k": 0.0, "flip_rate": 0.25,
    }  # fmt: skip
    assert json.loads(json.dumps(found.tree(), allow_nan=False))["by_harness"]["x"]["pass^k"]["4"]["mean"] == pytest.approx(1 / 3)
    printed = "\n".join(text.lines(found))
    assert "pass^k" in printed and "by harness:\n  x  pass@1 0.500" in printed and "flip rate" in printed
    assert summarize([]) is None
    drawn = summarize(records, resampled=True)
    assert drawn is not None and drawn.whole.all_of[4] == bootstrap([1.0, 0.5, 0.0]), "resampling is asked for"
    assert drawn.whole.at_least_one[1] == (drawn.whole.rate.pass_at_1, drawn.whole.rate.low, drawn.whole.rate.high)
    assert drawn.by_harness["x"].flips == bootstrap([0.0, 2 / 3, 0.0]) and drawn.by_kind["find"].rate.low == 0.125
    compared = compare({"a": [True], "b": [True]}, {"a": [False], "b": [True]}, resampled=True)
    assert compared is not None and compared.difference == bootstrap([1.0, 0.0])


def test_evaluations_in_several_harnesses() -> None:
    here = {"x": {"a": [True], "b": [True]}, "y": {"a": [True], "b": [False]}, "z": {"a": [True]}}
    there = {"x": {"a": [False], "b": [False]}, "y": {"a": [True], "b": [False]}}
    found = compare_harnesses(here, there)
    assert found is not None and (found.tasks, found.here, found.there) == (2, 0.75, 0.25), "of the harnesses that both have"
    assert (found.difference.mean, found.p) == (0.5, 0.5)
    alone = compare_harnesses({"x": here["x"]}, {"z": {"a": [False]}})
    assert alone is not None and alone.tasks == 1, "one against another harness"
    assert compare_harnesses(here, {"w": {"a": [True]}, "v": {}}) is None


def test_few_tasks_never_tell_two_apart() -> None:
    found = compare({"a": [True], "b": [True]}, {"a": [False], "b": [False]})
    assert found is not None and found.difference.low == 1.0
    assert "does not tell the two apart" in "".join(text.comparison_lines("a", "b", found))


def test_a_comparison_is_said_in_words() -> None:
    here = {f"t{number}": [True, True] for number in range(8)}
    there = {f"t{number}": [False, True] for number in range(8)}
    assert len(list(text.comparison_lines("a", "b", compare(here, there)))) == 1
    assert "does not tell the two apart" in "\n".join(text.comparison_lines("a", "b", compare(here, here)))
    assert list(text.comparison_lines("a", "b", None)) == ["a and b have no task in common on which both have a reward"]


def test_the_evaluation_of_a_run_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create(training=False)
    assert stored(str(tmp_path / "nothing")) is None
    with pytest.raises(UserError, match="holds no evaluation"):
        stored(str(tmp_path))
    for sample in range(2):
        made = rated("t", "x", sample, 1.0, tmp_path)
        (run.rollouts / made.id).mkdir()
        (run.rollouts / made.id / "result.json").write_text(made.model_dump_json())
    found = stored(str(tmp_path))
    assert found is not None and len(found) == 2
