"""Builders: what is trained is what the engine sampled, each token once, behind exactly what it was conditioned on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.trajectories.builders import BUILDERS, chain, per_call
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.sample import SampleError
from tests.unit.making import make_call

# --- by hand -----------------------------------------------------------------------------------------------------------------------


def test_two_turns_become_one_sample() -> None:
    calls = [
        make_call([1, 2], [5, 6], order=0, logprobs=[-0.1, -0.2], spans=[("0.3", 0, 1), ("0.4", 1, 2)]),
        make_call([1, 2, 5, 6, 7], [8], order=1, logprobs=[-0.3], spans=[("0.4", 0, 1)], sampling={"temperature": 0.7}),
    ]
    (sample,) = chain.build(calls)
    assert sample.ids == [1, 2, 5, 6, 7, 8]
    assert sample.mask == [False, False, True, True, False, True]
    assert sample.logprobs == [0, 0, -0.1, -0.2, 0, -0.3]
    assert sample.steps == [-1, -1, 3, 4, -1, 4]
    assert sample.temperature == [1, 1, 1, 1, 1, 0.7]
    assert sample.call == [-1, -1, 0, 0, -1, 1]


def test_per_call_repeats_the_prompt_and_trains_its_own_tokens_only() -> None:
    calls = [make_call([1, 2], [5, 6], order=0), make_call([1, 2, 5, 6, 7], [8], order=1)]
    first, second = per_call.build(calls)
    assert (first.ids, first.mask) == ([1, 2, 5, 6], [False, False, True, True])
    assert (second.ids, second.mask) == ([1, 2, 5, 6, 7, 8], [False] * 5 + [True])


def test_a_rewritten_history_begins_a_new_sample() -> None:
    # The template took token 6 of the first answer out.
    calls = [make_call([1, 2], [5, 6], order=0), make_call([1, 2, 5, 7], [8], order=1)]
    assert [sample.ids for sample in chain.build(calls)] == [[1, 2, 5, 6], [1, 2, 5, 7, 8]]


def test_a_retokenised_answer_is_not_merged() -> None:
    # "he" + "llo" came back as "hello": other ids, so another sample, and never the ids that the engine did not emit.
    calls = [make_call([1], [20, 21], order=0), make_call([1, 22, 3], [4], order=1)]
    samples = chain.build(calls)
    assert [sample.ids for sample in samples] == [[1, 20, 21], [1, 22, 3, 4]]
    assert samples[1].mask == [False, False, False, True]


def test_of_two_continuations_the_first_to_end_joins_and_nothing_is_trained_twice() -> None:
    calls = [make_call([1], [2], order=0), make_call([1, 2, 3], [4], order=1), make_call([1, 2, 5], [6], order=2)]
    first, second = chain.build(calls)
    assert first.ids == [1, 2, 3, 4] and first.mask == [False, True, False, True]
    assert second.ids == [1, 2, 5, 6] and second.mask == [False, False, False, True]


def test_two_agents_make_two_chains_although_their_calls_alternate() -> None:
    calls = [
        make_call([1], [2], order=0),
        make_call([9], [8], order=1, kind="subagent"),
        make_call([1, 2, 3], [4], order=2),
        make_call([9, 8, 7], [6], order=3, kind="subagent"),
    ]
    assert [sample.ids for sample in chain.build(calls)] == [[1, 2, 3, 4], [9, 8, 7, 6]]


def test_the_longest_fitting_chain_is_continued() -> None:
    for first, second in (([2], [2, 3]), ([2, 3], [2])):
        calls = [make_call([1], first, order=0), make_call([1], second, order=1), make_call([1, 2, 3, 4], [5], order=2)]
        assert sorted(sample.ids for sample in chain.build(calls)) == [[1, 2], [1, 2, 3, 4, 5]]


def test_tokens_of_an_untrainable_call_inside_a_chain_are_context() -> None:
    calls = [
        make_call([1], [2], order=0),
        make_call([1, 2, 3], [4], order=1, masked_by_grammar=True),
        make_call([1, 2, 3, 4, 5], [6], order=2),
    ]
    (sample,) = chain.build(calls)
    assert sample.ids == [1, 2, 3, 4, 5, 6]
    assert sample.mask == [False, True, False, False, False, True]
    assert sample.call == [-1, 0, -1, -1, -1, 2]


@pytest.mark.parametrize("changes", [{"delivered": False}, {"superseded_by": "x"}, {"status": "cancelled", "spans": None}])
def test_a_reply_that_nobody_got_does_not_cut_the_chain_for_its_retry(changes: dict[str, Any]) -> None:
    calls = [make_call([1], [2], order=0), make_call([1, 2, 3], [4, 4], order=1, **changes), make_call([1, 2, 3], [5], order=2)]
    (sample,) = chain.build(calls)
    assert sample.ids == [1, 2, 3, 5] and sample.call == [-1, 0, -1, 2]


@pytest.mark.parametrize("build", BUILDERS.values())
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
def test_a_call_that_is_not_trainable_makes_no_sample(build: Any, changes: dict[str, Any]) -> None:
    assert build([make_call([1], [2, 3], **changes)]) == []


@pytest.mark.parametrize("build", BUILDERS.values())
def test_an_empty_reply_makes_no_sample(build: Any) -> None:
    assert build([make_call([1], [])]) == []


def test_a_reply_cut_at_its_length_is_trained() -> None:
    assert chain.build([make_call([1], [2], status="length", finish_reason="length")])[0].mask == [False, True]


@pytest.mark.parametrize("build", BUILDERS.values())
def test_only_chosen_calls_are_trained(build: Any) -> None:
    calls = [make_call([1], [2], order=0), make_call([1, 2, 3], [4], order=1)]
    (sample,) = build(calls, {1})
    assert sample.ids == [1, 2, 3, 4] and sample.mask == [False, False, False, True]


@pytest.mark.parametrize("build", BUILDERS.values())
@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ([], {}, "empty prompt"),
        ([1], {"sampling": {"temperature": 0.0}}, "temperature 0"),
        ([1], {"spans": [("0.3", 0, 1)]}, "do not cover"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused_by_call(build: Any, prompt: list[int], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleError, match=rf"call g00000-0.0/000 .*{words}"):
        build([make_call(prompt, [2, 3], **changes)])


# --- any session -------------------------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), max_size=3)
"""Few different tokens, so that prefixes meet by chance as well."""


@st.composite
def sessions(draw: st.DrawFn) -> list[Call]:
    calls: list[Call] = []
    for order in range(draw(st.integers(0, 9))):
        history: list[int] = [7]
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            history = [*earlier.prompt_ids, *earlier.ids]
            if draw(st.integers(0, 4)) == 0:
                history = history[: draw(st.integers(1, len(history)))]
        ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        cut = draw(st.integers(0, len(ids)))
        calls.append(
            make_call(
                [*history, *draw(TOKENS)],
                ids,
                order=order,
                logprobs=draw(st.lists(st.floats(-30, 0, width=32), min_size=len(ids), max_size=len(ids))),
                spans=[("0.1", 0, cut), ("0.2", cut, len(ids))],
                sampling={"temperature": draw(st.sampled_from([0.5, 1.0]))},
                delivered=draw(st.sampled_from([True, True, True, False])),
                masked_by_grammar=draw(st.sampled_from([False, False, False, True])),
                superseded_by=draw(st.sampled_from([None, None, None, "other"])),
            )
        )
    return calls


def trained_tokens(calls: list[Call], samples: list[Any]) -> Counter[tuple[int, int]]:
    """(call, place in its sampled ids) of every trained position, after checking the position against the call."""
    found: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        assert (
            len({len(values) for values in (sample.ids, sample.mask, sample.logprobs, sample.steps, sample.temperature, sample.call)}) == 1
        )
        for position, trained in enumerate(sample.mask):
            if not trained:
                assert (sample.logprobs[position], sample.steps[position], sample.temperature[position], sample.call[position]) == (
                    0,
                    -1,
                    1,
                    -1,
                )
                continue
            call = calls[sample.call[position]]
            place = position - len(call.prompt_ids)
            assert sample.ids[: position + 1] == [*call.prompt_ids, *call.ids[: place + 1]], "conditioned on what the engine saw"
            assert sample.logprobs[position] == call.logprobs[place]
            assert sample.steps[position] == int(call.versions()[place].rpartition(".")[2])
            assert sample.temperature[position] == call.temperature
            found[sample.call[position], place] += 1
    return found


@settings(max_examples=300, deadline=None)
@given(sessions(), st.data())
def test_every_builder_trains_exactly_the_chosen_tokens_each_once(calls: list[Call], data: st.DataObject) -> None:
    trainable = [ordinal for ordinal, call in enumerate(calls) if call.trainable]
    chosen = data.draw(st.none() | st.sets(st.sampled_from(trainable) if trainable else st.nothing()))
    expected = Counter((n, place) for n in trainable if chosen is None or n in chosen for place in range(len(calls[n].ids)))
    made = {name: build(calls, chosen) for name, build in BUILDERS.items()}
    for samples in made.values():
        assert trained_tokens(calls, samples) == expected
        assert all(sample.trained for sample in samples)
    assert len(made["chain"]) <= len(made["per_call"])
    assert {name: build(calls, chosen) for name, build in BUILDERS.items()} == made, "the same again"


@settings(max_examples=200, deadline=None)
@given(sessions())
def test_a_chain_is_what_the_engine_saw_in_its_last_call(calls: list[Call]) -> None:
    for sample in chain.build(calls):
        last = calls[max(sample.call)]
        assert sample.ids == [*last.prompt_ids, *last.ids]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=12))
def test_an_honest_conversation_is_always_one_sample(turns: list[tuple[list[int], list[int]]]) -> None:
    calls, history = [], [7]
    for order, (given_tokens, sampled) in enumerate(turns):
        calls.append(make_call([*history, *given_tokens], sampled, order=order))
        history = [*history, *given_tokens, *sampled]
    assert [sample.ids for sample in chain.build(calls)] == [history]
