"""Credit (Eq. 1) and which calls are trained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.config import Credit
from forge_ray.trajectories import credit
from forge_ray.trajectories.credit import CallCredit
from tests.unit.making import make_call


def calls_of(*kinds: str, **changes: Any) -> list[Any]:
    return [make_call([1], [2], order=order, kind=kind, **changes) for order, kind in enumerate(kinds)]


def test_each_call_gets_the_terminal_reward_discounted_by_the_calls_after_it() -> None:
    assert credit.rewards(calls_of("agent", "agent", "agent"), 8.0, Credit(gamma=0.5)) == {0: 2.0, 1: 4.0, 2: 8.0}
    assert credit.rewards(calls_of("agent", "subagent", "agent"), 0.5) == {0: 0.5, 1: 0.5, 2: 0.5}
    assert credit.rewards([], 1.0) == {}


def test_weights_by_kind_and_their_defaults() -> None:
    calls = calls_of("agent", "subagent", "compaction", "aux", "never heard of")
    assert credit.assign(calls) == {n: CallCredit(1.0, 1.0) for n in (0, 1, 2, 4)}
    assert credit.assign(calls, Credit(kind_weights={"subagent": 0.25, "aux": 0.5, "compaction": 0.0})) == {
        0: CallCredit(1.0, 1.0),
        1: CallCredit(1.0, 0.25),
        3: CallCredit(1.0, 0.5),
        4: CallCredit(1.0, 1.0),
    }


def test_a_title_request_that_ends_last_does_not_discount_the_answer() -> None:
    assert credit.assign(calls_of("agent", "agent", "aux"), Credit(gamma=0.5)) == {0: CallCredit(0.5, 1.0), 1: CallCredit(1.0, 1.0)}


@pytest.mark.parametrize(
    "changes", [{"superseded_by": "x"}, {"delivered": False}, {"status": "cancelled"}, {"status": "failed"}, {"status": "open"}]
)
def test_a_reply_that_the_harness_never_had_is_not_a_step(changes: dict[str, Any]) -> None:
    calls = calls_of("agent", "agent", "agent")
    calls[1] = make_call([1], [2], order=1, **changes)
    assert credit.assign(calls, Credit(gamma=0.5)) == {0: CallCredit(0.5, 1.0), 2: CallCredit(1.0, 1.0)}


def test_a_step_that_may_not_be_trained_keeps_its_place() -> None:
    calls = calls_of("agent", "agent", "agent")
    calls[1] = make_call([1], [2], order=1, masked_by_grammar=True)
    assert credit.assign(calls, Credit(gamma=0.5)) == {0: CallCredit(0.25, 1.0), 2: CallCredit(1.0, 1.0)}


def test_scopes() -> None:
    calls = calls_of("agent", "subagent", "agent", "compaction", "subagent")
    assert set(credit.assign(calls, Credit(scope="all"))) == {0, 1, 2, 3, 4}
    assert set(credit.assign(calls, Credit(scope="outermost"))) == {0, 2}
    assert set(credit.assign(calls, Credit(scope="last"))) == {4}
    assert set(credit.assign(calls, Credit(scope="last", kind_weights={"subagent": 0}))) == {3}
    assert credit.assign(calls, Credit(scope="outermost", gamma=0.5)) == {0: CallCredit(0.0625, 1.0), 2: CallCredit(0.25, 1.0)}, (
        "masked, not renumbered"
    )
    calls[4] = make_call([1], [2], order=4, kind="subagent", masked_by_grammar=True)
    assert credit.assign(calls, Credit(scope="last")) == {}, "the last call was no free choice: nothing to train, not another call instead"
    assert credit.assign([], Credit(scope="last")) == {}


@given(st.permutations(range(6)))
def test_the_order_of_completion_does_not_depend_on_the_order_given(order: list[int]) -> None:
    calls = [make_call([1], [2], order=n) for n in range(4)]
    calls += [make_call([1], [2], order=3, id="g00000-0.0/tie"), make_call([1], [2], order=9, ended=None, status="open")]
    ids = ["g00000-0.0/000", "g00000-0.0/001", "g00000-0.0/002", "g00000-0.0/003", "g00000-0.0/tie", "g00000-0.0/009"]
    assert [call.id for call in credit.by_completion([calls[n] for n in order])] == ids
