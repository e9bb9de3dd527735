"""Trajectories: the same out of the calls dataset and out of calls, whatever the order in which they ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.store import calls as stored
from forge_ray.trajectories.trajectory import Recorded, Trajectory, TrajectoryError, of_calls, of_table
from forge_ray.trajectories.trie import ROOT, Trie, add
from tests.unit.making import make_call
from tests.unit.random_sessions import sessions


def plain(call: Recorded) -> list[Any]:
    values = (getattr(call, name) for name in Recorded.__dataclass_fields__)
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


@settings(max_examples=80, deadline=None)
@given(sessions(session="r0"), sessions(session="r1"))
def test_the_dataset_and_the_calls_give_the_same_trajectories(first: list[Call], second: list[Call]) -> None:
    filled = [calls for calls in (first, second) if calls]
    whole = pa.concat_tables([stored.table(calls) for calls in filled] or [stored.SCHEMA.empty_table()])
    found = of_table(whole, facts={"r0": {"group": 4, "task": "t"}})
    assert [one.rollout for one in found] == [calls[0].session for calls in filled]
    for one, calls in zip(found, filled, strict=True):
        assert list(map(plain, one.calls)) == list(map(plain, of_calls(one.rollout, calls).calls))
        assert [call.trainable for call in one.calls] == [call.trainable for call in calls]
        assert (one.group, one.task) == ((4, "t") if one.rollout == "r0" else (None, ""))
    mixed = whole.take(pa.array(range(whole.num_rows)[::-1], pa.int64()))
    assert {one.rollout: list(map(plain, one.calls)) for one in of_table(mixed)} == {
        one.rollout: list(map(plain, one.calls)) for one in found
    }


@settings(max_examples=80, deadline=None)
@given(sessions())
def test_a_trie_spells_the_prompt_and_the_whole_of_every_call(calls: list[Call]) -> None:
    trie = Trie()
    made = of_calls("r", calls)
    ends = add(trie, made)
    order = made.lineage()
    assert sorted(order) == list(range(len(calls)))
    assert all(order.index(call.parent) < order.index(number) for number, call in enumerate(made.calls) if call.parent >= 0)
    for ordinal, call in enumerate(calls):
        assert trie.spell(ends.prompt[ordinal]).tolist() == call.prompt_ids
        assert trie.spell(ends.whole[ordinal]).tolist() == [*call.prompt_ids, *call.ids]
    assert trie.spell(ROOT).tolist() == []


def test_a_place_beyond_a_path_is_refused() -> None:
    trie = Trie()
    node = trie.insert(ROOT, 0, np.array([1, 2], np.int32))
    with pytest.raises(ValueError, match="2 tokens has no place 3"):
        trie.insert(node, 3, np.array([1], np.int32))


def test_grammar_calls_are_trained_where_the_run_says_so() -> None:
    table = stored.table([make_call([1], [2], masked_by_grammar=True)])
    assert [one.calls[0].trainable for one in (of_table(table)[0], of_table(table, train_grammar_calls=True)[0])] == [False, True]


def test_what_was_said_of_an_image_is_not_trained_whatever_the_run_says() -> None:
    """The learner sees its placeholders, not the image: it would compute other log-probabilities than the engine."""
    call = make_call([1], [2], media=["image:5f"])
    made = [of_calls("g00000-0.0", [call]), *(of_table(stored.table([call]), train_grammar_calls=lift)[0] for lift in (False, True))]
    assert [one.calls[0].trainable for one in made] == [False] * 3 and not call.trainable


def test_a_parent_that_is_not_there_is_named() -> None:
    whole = [make_call([1], [2], order=0), make_call([1, 2, 3], [4], order=1, parent="g00000-0.0/000", shared=2)]
    with pytest.raises(TrajectoryError, match=r"call g00000-0.0/001 .* its parent g00000-0.0/000 is not among"):
        of_table(stored.table(whole).slice(1))
    assert of_calls("r", whole[1:]).calls[0].new.tolist() == [1, 2, 3], "a call has its whole prompt"


def test_calls_that_descend_from_one_another_in_a_circle_are_refused() -> None:
    calls = of_calls("r", [make_call([1], [2], order=0), make_call([1], [2], order=1)]).calls
    calls[0].parent, calls[1].parent = 1, 0
    with pytest.raises(TrajectoryError, match="its own ancestor"):
        Trajectory("r", calls).lineage()


def test_spans_that_leave_a_hole_are_no_versions() -> None:
    holes = ([("0.1", 1, 2)], [("0.1", 0, 1)], [("0.1", 0, 1), ("0.1", 0, 2)], [])
    of_the_right_length = ([("0.1", 1, 3)], [("0.1", 0, 1), ("0.2", 0, 1)], [("0.1", 0, 1), ("0.2", 2, 3)])
    for spans in (*holes, *of_the_right_length):
        call = make_call([1], [2, 3], spans=spans)
        for made in (of_calls("g00000-0.0", [call]), of_table(stored.table([call]))[0]):
            assert len(made.calls[0].steps) != 2
