"""The numbers that tell why rollouts became many samples."""

from __future__ import annotations

from typing import Any

from forge_ray.config import Train
from forge_ray.trajectories import batch
from forge_ray.trajectories.continuity import counts, general, told, warning
from tests.unit.making import make_call, make_record


def _call(order: int, splice: str, reason: str | None = None, **changes: Any) -> Any:
    return make_call([9, order], [1], order=order, splice=splice, reason=reason, **changes)


def test_counts_and_the_commonest_reason() -> None:
    one = [
        _call(0, "new"),
        _call(1, "exact"),
        _call(2, "spliced", "the reply came back in other tokens"),
        _call(3, "fork", "user item 4 changed (token 812: 'a' became 'b')"),
        _call(4, "fork", "user item 17 changed (token 9: 'c' became 'd')"),
        _call(5, "fork", "text of the reply differs at character 3: 'x' became 'y'"),
        _call(6, "fork", "no tools are declared any more", kind="compaction"),
        _call(7, "fork", "user item 4 changed", superseded_by="other"),
        _call(8, "fork", "user item 4 changed", delivered=False),
    ]
    assert told([counts(one), counts([_call(9, "exact")])]) == {
        "calls_exact": 2,
        "calls_spliced": 1,
        "calls_forked": 3,
        "fork_reason": "2 x user item N changed",
    }
    assert told([counts([_call(0, "new")])]) == {"calls_exact": 0, "calls_spliced": 0, "calls_forked": 0}


def test_reasons_are_grouped_by_what_they_say() -> None:
    assert general("text of the reply differs at character 3: 'x' became 'y'") == "text of the reply differs"
    assert general("arguments of tool call 1 (edit): `path` is gone") == "arguments of tool call N (edit): `path` is gone"
    assert general(None) == "no reason was recorded"


def test_a_user_is_told_when_many_calls_fork() -> None:
    stats = {"calls_exact": 60, "calls_spliced": 20, "calls_forked": 20, "samples_per_rollout": 2.75, "fork_reason": "9 x why"}
    line = warning(stats)
    assert line is not None and line.startswith("20 of 100 calls did not continue the call before them (20%, 2.8 samples per rollout)")
    assert "9 x why" in line
    assert warning({**stats, "calls_forked": 5}) is None and warning({"calls_exact": 3}) is None


def test_a_step_batch_tells_how_its_calls_continue_one_another() -> None:
    calls = [make_call([1], [2], order=0, session="a.0"), make_call([1, 2, 3], [4], order=1, session="a.0", splice="exact")]
    broken = [make_call([1], [2], session="b.0", splice="fork", reason="x")]
    step = batch.build_step([[(make_record("a.0", 1), calls), (make_record("b.0", None), broken)]], Train())
    assert {name: step.stats[name] for name in ("calls_exact", "calls_spliced", "calls_forked")} == {
        "calls_exact": 1,
        "calls_spliced": 0,
        "calls_forked": 0,
    }
