"""Which recorded sequence a prompt extends, what a session used, and how the views of several replicas are merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.config import Limits
from forge_ray.serve_proxy.client import merge
from forge_ray.serve_proxy.prompt_tree import common_prefix
from forge_ray.serve_proxy.session_index import SessionIndex
from tests.unit.making import make_call


def _index(**limits: Any) -> SessionIndex:
    return SessionIndex("r1", Limits(**limits))


def _call(
    index: SessionIndex, prompt: list[int], ids: list[int], call: str, *, status: str = "finished", kind: str = "agent", at: float = 0.0
) -> Any:
    place = index.place("s", prompt, call)
    index.sampled("s", len(ids))
    index.end("s", call, ids, status, kind, at)
    return place


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32)) == expected


def test_a_linear_conversation_has_one_parent_each_and_keeps_new_tokens_only() -> None:
    index, root = _index(), list(range(100, 120))
    first = _call(index, root, [1, 2], "a")
    assert (first.parent, first.shared, first.conversation) == (None, 0, "a")
    prompt = [*root, 1, 2, 50, 51]
    second = _call(index, prompt, [3], "b")
    assert (second.parent, second.shared, second.conversation) == ("a", 22, "a")
    third = _call(index, [*prompt, 3, 60], [4], "c")
    assert (third.parent, third.shared, third.conversation) == ("b", 25, "a")
    assert [call.tail.tolist() for call in index.state("s").tree.calls.values()] == [root, [50, 51], [60]]


def test_a_prompt_that_drops_what_was_sampled_is_a_fork_of_the_same_conversation() -> None:
    index, root = _index(), list(range(100, 130))
    _call(index, root, [1, 2, 3], "a")
    fork = _call(index, [*root, 9, 9], [1], "b")
    assert (fork.parent, fork.shared, fork.conversation) == ("a", 30, "a")


def test_another_first_message_is_another_conversation_and_shares_the_system_prompt() -> None:
    index, system = _index(), list(range(100, 150))
    _call(index, [*system, *range(1, 21)], [7], "a")
    other = _call(index, [*system, *range(30, 50)], [7], "b")
    assert (other.parent, other.shared, other.conversation) == ("a", 50, "b")
    again = _call(index, [*system, *range(1, 21), 7, 8], [7], "c")
    assert (again.parent, again.conversation) == ("a", "a")


def test_a_running_call_can_be_a_parent_only_by_its_prompt() -> None:
    index, root = _index(), list(range(100, 110))
    index.place("s", root, "a")
    retry = index.place("s", root, "b")
    assert (retry.parent, retry.shared) == ("a", 10)
    index.end("s", "a", [1, 2], "cancelled", "agent", 1.0)
    assert index.place("s", [*root, 1, 2, 3], "c").parent == "a"


def test_sequences_of_different_sessions_never_meet() -> None:
    index = _index()
    index.place("s", [1, 2, 3], "a")
    assert index.place("other", [1, 2, 3], "b").parent is None


def test_limits() -> None:
    index = _index(calls=2, sampled_tokens=10, context_tokens=50)
    assert index.exhausted("s") is None and index.remaining_tokens("s") == 10
    assert (index.window(2048), index.window(40)) == (50, 40)
    _call(index, [1], [1] * 4, "a")
    assert (index.exhausted("s"), index.remaining_tokens("s")) == (None, 6)
    _call(index, [1], [1] * 5, "b", status="cancelled")
    assert (index.exhausted("s"), index.remaining_tokens("s")) == ("calls", 1)
    assert index.reach("s", "calls") and not index.reach("s", "tokens")
    assert index.exhausted("s") == "calls"


def test_a_closed_session_keeps_its_counters_and_no_token() -> None:
    index = _index()
    index.place("s", [1, 2], "a")
    assert index.close("s") and not index.close("s") and index.closed("s")
    index.end("s", "a", [3], "cancelled", "agent", 1.0)
    assert index.state("s").tree.calls == {} and index.state("s").counts["r1"].last_status == "cancelled"
    assert not index.closed("unknown")


def test_the_last_call_is_the_outermost_agents() -> None:
    index = _index()
    _call(index, [1], [2], "a", at=1.0)
    index.delivered("s", "a", "answer")
    _call(index, [5], [2], "b", kind="aux", at=2.0)
    index.delivered("s", "b", "tool_calls")
    summary = merge("s", [{"replica": "r1", **index.state("s").report()}])
    assert (summary.last_status, summary.last_reply, summary.calls) == ("finished", "answer", 2)


def test_overflow_holds_until_a_later_call_ends() -> None:
    index = _index()
    index.overflowed("s")
    assert merge("s", [{"replica": "r1", **index.state("s").report()}]).overflow
    _call(index, [1], [2], "a")
    assert not merge("s", [{"replica": "r1", **index.state("s").report()}]).overflow


def test_a_restored_session_goes_on_where_it_stopped() -> None:
    calls = [
        make_call([1] * 20, [2, 3], id="a", conversation="a", replica="dead", opened=0.5, ended=1.0),
        make_call(
            [*[1] * 20, 2, 3, 4], [], id="b", conversation="a", replica="dead", status="open", opened=1.5, ended=None, delivered=None
        ),
    ]
    index = SessionIndex("new", Limits())
    index.restore("s", calls, closed=False, limit=None)
    place = index.place("s", [*[1] * 20, 2, 3, 4, 5], "c")
    assert (place.parent, place.shared, place.splice) == ("a", 22, "exact")
    index.sampled("s", 1)
    index.end("s", "c", [6], "finished", "agent", 3.0)
    summary = merge("s", [{"replica": "new", **index.state("s").report()}])
    assert (summary.calls, summary.sampled_tokens, summary.failed) == (2, 3, 1)


def test_two_replicas_do_not_count_a_call_twice() -> None:
    old = SessionIndex("r1", Limits())
    _call(old, [1], [2, 2], "a", at=1.0)
    young = SessionIndex("r2", Limits())
    young.restore("s", [make_call([1], [2, 2], id="a", conversation="a", replica="r1", ended=1.0)], closed=False, limit=None)
    _call(young, [1, 2, 2, 9], [3], "b", at=2.0)
    reports = [{"replica": name, **index.state("s").report()} for name, index in (("r1", old), ("r2", young))]
    for order in (reports, reports[::-1]):
        summary = merge("s", order)
        assert (summary.calls, summary.sampled_tokens, summary.failed) == (2, 3, 0)


def test_merge_of_nothing() -> None:
    assert merge("s", [{"replica": "r1", "limit": None, "counts": {}}]).calls == 0


@pytest.mark.parametrize("limit", [None, "tokens"])
def test_merge_keeps_a_limit(limit: str | None) -> None:
    reports = [{"replica": "r1", "limit": None, "counts": {}}, {"replica": "r2", "limit": limit, "counts": {}}]
    assert merge("s", reports).limit == limit
