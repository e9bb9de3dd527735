"""Builders: what is trained is what the engine sampled, each token once, behind exactly what it was conditioned on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.trajectories import builders
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.split import flat
from forge_ray.trajectories.trajectory import Trajectory, TrajectoryError
from forge_ray.trajectories.tree_schema import is_tree
from tests import reference_builders
from tests.built import chains, rows
from tests.unit.making import make_call
from tests.unit.random_sessions import TOKENS, sessions, shares, steps

# --- by hand -----------------------------------------------------------------------------------------------------------------------


def test_two_turns_become_one_sample() -> None:
    calls = [
        make_call([1, 2], [5, 6], order=0, logprobs=[-0.125, -0.25], spans=[("0.3", 0, 1), ("0.4", 1, 2)]),
        make_call([1, 2, 5, 6, 7], [8], order=1, logprobs=[-0.375], spans=[("0.4", 0, 1)], sampling={"temperature": 0.5}),
    ]
    (sample,) = chains(calls)
    assert sample.ids == [1, 2, 5, 6, 7, 8]
    assert sample.mask == [False, False, True, True, False, True]
    assert sample.logprobs == [0, 0, -0.125, -0.25, 0, -0.375]
    assert sample.steps == [-1, -1, 3, 4, -1, 4]
    assert sample.temperature == [1, 1, 1, 1, 1, 0.5]
    assert sample.call == [-1, -1, 0, 0, -1, 1]


def test_per_call_repeats_the_prompt_and_trains_its_own_tokens_only() -> None:
    calls = [make_call([1, 2], [5, 6], order=0), make_call([1, 2, 5, 6, 7], [8], order=1)]
    first, second = rows("per_call", calls)
    assert (first.ids, first.mask) == ([1, 2, 5, 6], [False, False, True, True])
    assert (second.ids, second.mask) == ([1, 2, 5, 6, 7, 8], [False] * 5 + [True])


def test_a_rewritten_history_begins_a_new_sample() -> None:
    # The template took token 6 of the first answer out.
    calls = [make_call([1, 2], [5, 6], order=0), make_call([1, 2, 5, 7], [8], order=1)]
    assert [sample.ids for sample in chains(calls)] == [[1, 2, 5, 6], [1, 2, 5, 7, 8]]


def test_a_retokenised_answer_is_not_merged() -> None:
    # "he" + "llo" came back as "hello": other ids, so another sample, and never the ids that the engine did not emit.
    calls = [make_call([1], [20, 21], order=0), make_call([1, 22, 3], [4], order=1)]
    samples = chains(calls)
    assert [sample.ids for sample in samples] == [[1, 20, 21], [1, 22, 3, 4]]
    assert samples[1].mask == [False, False, False, True]


def test_of_two_continuations_the_first_to_end_joins_and_nothing_is_trained_twice() -> None:
    calls = [make_call([1], [2], order=0), make_call([1, 2, 3], [4], order=1), make_call([1, 2, 5], [6], order=2)]
    first, second = chains(calls)
    assert first.ids == [1, 2, 3, 4] and first.mask == [False, True, False, True]
    assert second.ids == [1, 2, 5, 6] and second.mask == [False, False, False, True]


def test_two_agents_make_two_chains_although_their_calls_alternate() -> None:
    calls = [
        make_call([1], [2], order=0),
        make_call([9], [8], order=1, kind="subagent"),
        make_call([1, 2, 3], [4], order=2),
        make_call([9, 8, 7], [6], order=3, kind="subagent"),
    ]
    assert [sample.ids for sample in chains(calls)] == [[1, 2, 3, 4], [9, 8, 7, 6]]


def test_the_longest_fitting_chain_is_continued() -> None:
    for first, second in (([2], [2, 3]), ([2, 3], [2])):
        calls = [make_call([1], first, order=0), make_call([1], second, order=1), make_call([1, 2, 3, 4], [5], order=2)]
        assert sorted(sample.ids for sample in chains(calls)) == [[1, 2], [1, 2, 3, 4, 5]]


def test_of_two_equal_chains_the_first_is_continued() -> None:
    calls = [make_call([1], [2], order=0), make_call([1], [2], order=1), make_call([1, 2, 3], [4], order=2)]
    assert [sample.call for sample in chains(calls)] == [[-1, 0, -1, 2], [-1, 1]]


def test_tokens_of_an_untrainable_call_inside_a_chain_are_context() -> None:
    calls = [
        make_call([1], [2], order=0),
        make_call([1, 2, 3], [4], order=1, masked_by_grammar=True),
        make_call([1, 2, 3, 4, 5], [6], order=2),
    ]
    (sample,) = chains(calls)
    assert sample.ids == [1, 2, 3, 4, 5, 6]
    assert sample.mask == [False, True, False, False, False, True]
    assert sample.call == [-1, 0, -1, -1, -1, 2]


@pytest.mark.parametrize("changes", [{"delivered": False}, {"superseded_by": "x"}, {"status": "cancelled", "spans": None}])
def test_a_reply_that_nobody_got_does_not_cut_the_chain_for_its_retry(changes: dict[str, Any]) -> None:
    calls = [make_call([1], [2], order=0), make_call([1, 2, 3], [4, 4], order=1, **changes), make_call([1, 2, 3], [5], order=2)]
    (sample,) = chains(calls)
    assert sample.ids == [1, 2, 3, 5] and sample.call == [-1, 0, -1, 2]


@pytest.mark.parametrize("name", ["chain", "per_call"])
@pytest.mark.parametrize(
    "changes",
    [
        {"status": "open"},
        {"status": "failed", "spans": None},
        {"delivered": None},
        {"delivered": False},
        {"superseded_by": "x"},
        {"masked_by_grammar": True},
        {"spans": None},
        {"logprobs": []},
    ],
)
def test_a_call_that_is_not_trainable_makes_no_sample(name: str, changes: dict[str, Any]) -> None:
    assert rows(name, [make_call([1], [2, 3], **changes)]) == []


@pytest.mark.parametrize("name", ["chain", "per_call"])
def test_an_empty_reply_makes_no_sample(name: str) -> None:
    assert rows(name, [make_call([1], [])]) == []


def test_a_reply_cut_at_its_length_is_trained() -> None:
    assert chains([make_call([1], [2], status="length", finish_reason="length")])[0].mask == [False, True]


@pytest.mark.parametrize("name", ["chain", "per_call"])
def test_only_chosen_calls_are_trained(name: str) -> None:
    calls = [make_call([1], [2], order=0), make_call([1, 2, 3], [4], order=1)]
    (sample,) = rows(name, calls, {1})
    assert sample.ids == [1, 2, 3, 4] and sample.mask == [False, False, False, True]


@pytest.mark.parametrize("name", ["chain", "per_call"])
@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ([], {}, "empty prompt"),
        ([1], {"sampling": {"temperature": 0.0}}, "temperature 0"),
        ([1], {"spans": [("0.3", 0, 1)]}, "do not cover"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused_by_call(name: str, prompt: list[int], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TrajectoryError, match=rf"call g00000-0.0/000 .*{words}"):
        rows(name, [make_call(prompt, [2, 3], **changes)])


# --- any session -------------------------------------------------------------------------------------------------------------------


def trained_tokens(calls: list[Call], samples: list[Any]) -> Counter[tuple[int, int]]:
    """(call, place in its sampled ids) of every trained position, after checking the position against the call."""
    found: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        columns = (sample.ids, sample.mask, sample.logprobs, sample.steps, sample.temperature, sample.call)
        assert len({len(values) for values in columns}) == 1
        for position, (_, trained, *recorded) in enumerate(zip(*columns, strict=True)):
            if not trained:
                assert recorded == [0, -1, 1, -1]
                continue
            call = calls[sample.call[position]]
            place = position - len(call.prompt_ids)
            assert sample.ids[: position + 1] == [*call.prompt_ids, *call.ids[: place + 1]], "conditioned on what the engine saw"
            step = int(call.versions()[place].rpartition(".")[2])
            assert recorded == [call.logprobs[place], step, call.temperature, sample.call[position]]
            found[sample.call[position], place] += 1
    return found


@settings(max_examples=120, deadline=None)
@given(sessions(), st.data())
def test_every_builder_trains_exactly_the_chosen_tokens_each_once(calls: list[Call], data: st.DataObject) -> None:
    chosen = set(data.draw(shares(calls)))
    expected = Counter((ordinal, place) for ordinal in chosen for place in range(len(calls[ordinal].ids)))
    made = {name: rows(name, calls, chosen) for name in ("chain", "per_call")}
    for samples in made.values():
        assert trained_tokens(calls, samples) == expected
        assert all(any(sample.mask) for sample in samples)
    assert len(made["chain"]) <= len(made["per_call"])
    assert {name: rows(name, calls, chosen) for name in made} == made, "the same again"


@settings(max_examples=120, deadline=None)
@given(sessions(), st.data())
def test_the_builders_give_what_the_lists_by_the_book_give(calls: list[Call], data: st.DataObject) -> None:
    chosen = set(data.draw(shares(calls)))
    for name, by_the_book in (("chain", reference_builders.chain), ("per_call", reference_builders.per_call)):
        assert [vars(row) for row in rows(name, calls, chosen)] == [vars(sample) for sample in by_the_book(calls, chosen)]


@settings(max_examples=80, deadline=None)
@given(sessions())
def test_a_chain_is_what_the_engine_saw_in_its_last_call(calls: list[Call]) -> None:
    for sample in chains(calls):
        last = calls[max(sample.call)]
        assert sample.ids == [*last.prompt_ids, *last.ids]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=12))
def test_an_honest_conversation_is_always_one_sample(turns: list[tuple[list[int], list[int]]]) -> None:
    calls, history = [], [7]
    for order, (given_tokens, sampled) in enumerate(turns):
        calls.append(make_call([*history, *given_tokens], sampled, order=order))
        history = [*history, *given_tokens, *sampled]
    assert [sample.ids for sample in chains(calls)] == [history]


def totals(table: pa.Table) -> tuple[int, float, float]:
    """Trained tokens, and the sums of their weights and of weight times advantage."""
    weight, advantage = flat(table, "weight").astype(np.float64), flat(table, "advantage").astype(np.float64)
    trained = len(weight) if is_tree(table) else int(flat(table, "mask").sum())
    return trained, float(weight.sum()), float((weight * advantage).sum())


@settings(max_examples=120, deadline=None)
@given(steps())
def test_the_totals_do_not_depend_on_the_builder_and_each_shares_more_than_the_one_before(step: list[tuple[Any, Trajectory]]) -> None:
    trajectories = [one for _, one in step]
    tables = [builders.build("per_call", trajectories), builders.build("chain", trajectories)]
    tables += [builders.build("tree", trajectories, span="rollout"), builders.build("tree", trajectories, span="step")]
    assert len({totals(table) for table in tables}) == 1
    tokens = [len(flat(table, "ids")) for table in tables]
    assert tokens == sorted(tokens, reverse=True), "per_call, chain, a trie for each rollout, one for the step"
