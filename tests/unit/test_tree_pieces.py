"""The forest, its pieces and the ranks' course: no model."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.train_loop.tree import lockstep
from forge_ray.train_loop.tree.forest import Forest, ForestError, check, forest, join
from forge_ray.train_loop.tree.pieces import Cut, Program, plan, program
from forge_ray.trajectories.tree_schema import TREE_SCHEMA
from tests.unit.tries import Sampled, random_calls, sampled, trie

SEEDS = st.integers(0, 10_000)


def sequences(one: Forest) -> set[tuple[int, ...]]:
    """What each emission was conditioned on, with the emission itself."""
    found = set()
    for at, token in zip(one.at.tolist(), one.token.tolist(), strict=True):
        above = [j for j in range(at + 1) if at < one.sub_end[j]]
        assert [int(one.position[j]) for j in above] == list(range(len(above)))
        found.add((*one.ids[above].tolist(), token))
    return found


def wanted(calls: list[Sampled]) -> set[tuple[int, ...]]:
    return {tuple(call.ids[: place + 1].tolist()) for call in calls for place in call.positions}


@given(SEEDS)
def test_every_emission_sees_what_its_call_had_seen_and_nothing_else_is_kept(seed: int) -> None:
    calls = random_calls(np.random.default_rng(seed), vocabulary=4)
    one = trie(calls)
    check(one.sub_end, one.position, one.at)
    assert one.emissions == sum(int(call.mask.sum()) for call in calls)
    assert sequences(one) == wanted(calls)
    assert len(one) == len({tuple(call.ids[: n + 1]) for call in calls for place in call.positions for n in range(place)})


@given(SEEDS, st.integers(1, 3))
def test_minibatches_are_whole_rollouts_with_the_tokens_that_they_need(seed: int, parts: int) -> None:
    calls = random_calls(np.random.default_rng(seed))
    whole = trie(calls)
    cut = [whole.select(share) for share in whole.shares(parts, seed="x")]
    assert len(cut) == parts
    owners = [set(part.owner.tolist()) for part in cut]
    assert sum(len(own) for own in owners) == len(set.union(*owners)) == len({call.rollout for call in calls if call.mask.any()})
    for part, own in zip(cut, owners, strict=True):
        check(part.sub_end, part.position, part.at)
        assert sequences(part) == wanted([call for call in calls if call.rollout in own])


def test_a_table_of_tries_becomes_one_forest_without_what_has_no_weight() -> None:
    draw = np.random.default_rng(5)
    calls = [sampled(draw, [1, 2, 3], [False, True, True], 0, 0), sampled(draw, [1, 2, 4, 5], [False, False, True, True], 1, 0)]
    one = trie(calls, rollouts=("r0", "r1"))
    row = {name: getattr(one, name) for name in ("ids", "sub_end", "position", "at", "token", "logprobs", "steps", "temperature")}
    row |= {"advantage": one.advantage, "weight": np.where(one.owner == 0, 0, one.weight), "owner": one.owner, "call": one.call}
    names = {"rollouts": ["r0", "r1"], "groups": [1, 1], "tasks": ["t", "t"], "harnesses": ["h", "h"], "rewards": [0.0, 1.0]}
    other = {**row, "weight": one.weight}
    columns = {name: [values, other[name]] for name, values in row.items()}
    columns |= {name: [values, ["r2", "r3"] if name == "rollouts" else values] for name, values in names.items()}
    table = pa.table(columns).cast(TREE_SCHEMA)
    got = forest(table)
    assert got.rollouts == ("r0", "r1", "r2", "r3")
    assert sorted(set(got.owner.tolist())) == [1, 2, 3]
    # Of the first row only 1 2 4 is left, of which 4 predicts 5; of the second also 3's predictor, which is shared.
    assert got.ids.tolist() == [1, 2, 4, *one.ids.tolist()]
    check(got.sub_end, got.position, got.at)
    joined = join([one, one])
    assert joined.emissions == 2 * one.emissions and set(joined.owner.tolist()) == {0, 1, 2, 3}
    check(joined.sub_end, joined.position, joined.at)


@pytest.mark.parametrize(
    ("sub_end", "position", "at", "what"),
    [
        ([2, 3, 3], [0, 1, 1], [0], "does not nest"),
        ([3, 3, 3], [0, 1, 1], [0], "position 1 and 2 tokens"),
        ([3, 2, 3], [0, 1, 1], [3], "no token that predicts it"),
        ([4, 2, 3], [0, 1, 1], [0], "does not nest"),
    ],
)
def test_what_is_no_trie_is_refused(sub_end: list[int], position: list[int], at: list[int], what: str) -> None:
    with pytest.raises(ForestError, match=what):
        check(np.array(sub_end), np.array(position), np.array(at))


def seen(made: Program) -> set[tuple[int, int]]:
    """(key, query) pairs by what the pieces say."""
    found = set()
    for piece in made.pieces:
        for start, end, until in piece.own:
            found |= {(piece.start + k, piece.start + q) for k in range(start, end) for q in range(k, until)}
        for past in piece.past:
            holder = made.pieces[past.piece]
            keys = holder.start + holder.held[past.first : past.end]
            new = {(int(k), piece.start + q) for k in keys for q in range(past.until)}
            assert not new & found
            found |= new
    return found


def check_program(one: Forest, made: Program) -> None:
    """Whatever the cuts: each key is seen where it must be, and the operations are a possible order."""
    assert [piece.start for piece in made.pieces] == [0, *(piece.end for piece in made.pieces[:-1])][: len(made.pieces)]
    count = len(one)
    assert seen(made) == {(j, i) for i in range(count) for j in range(i + 1) if i < one.sub_end[j]}
    alive: list[int] = []
    ready: set[int] = set()
    undone: set[int] = set()
    for letter, number in made.operations:
        needs = {past.piece for past in made.pieces[number].past}
        assert needs <= ready and not needs & undone
        if letter == "B":
            assert alive.pop() == number
            undone.add(number)
        else:
            ready.add(number)
            alive += [number] if letter == "F" else []
    assert not alive and undone == set(range(len(made.pieces)))
    assert made.letters.count("F") == made.letters.count("B") == len(made.pieces)


@given(SEEDS, st.integers(1, 120))
def test_pieces_keep_to_the_budget_and_see_what_the_trie_says(seed: int, budget: int) -> None:
    one = trie(random_calls(np.random.default_rng(seed), vocabulary=4))
    made = plan(one.sub_end, one.position, budget)
    check_program(one, made)
    assert made.alive() <= budget
    assert made.computed() <= 2 * len(one)


@given(SEEDS, st.data())
def test_any_cuts_are_right(seed: int, data: st.DataObject) -> None:
    one = trie(random_calls(np.random.default_rng(seed), vocabulary=4))
    ends = sorted(data.draw(st.sets(st.integers(1, len(one)), max_size=6)) | {len(one)})
    check_program(one, program(one.sub_end, one.position, [Cut(end, data.draw(st.booleans())) for end in ends]))


def test_a_prompt_that_many_share_is_computed_once_and_what_fits_is_one_piece() -> None:
    draw = np.random.default_rng(0)
    prompt = list(range(100, 300))
    calls = [sampled(draw, [*prompt, *draw.integers(0, 50, 30)], [False] * 200 + [True] * 30, n, 0) for n in range(16)]
    one = trie(calls, rollouts=[str(n) for n in range(16)])
    whole = plan(one.sub_end, one.position, 10_000)
    assert len(whole.pieces) == 1 and whole.letters == "FB"
    cut = plan(one.sub_end, one.position, 250)
    assert cut.computed() <= len(one) + 200 and len(cut.pieces) <= 4
    roomy = plan(one.sub_end, one.position, 450)
    assert roomy.computed() == len(one)


def _letters(seed: int) -> str:
    one = trie(random_calls(np.random.default_rng(seed), vocabulary=4))
    return plan(one.sub_end, one.position, 1 + seed % 40).letters


@settings(max_examples=60)
@given(st.lists(st.one_of(st.just(""), SEEDS.map(_letters)), min_size=1, max_size=4))
def test_every_rank_can_follow_the_common_course_with_dummies(programs: list[str]) -> None:
    merged = lockstep.course(programs)
    assert merged.count("F") == merged.count("B")
    for letters in programs:
        alive: list[str] = []
        dummies: list[str] = []
        own = 0
        for letter, mine in zip(merged, lockstep.follow(letters, merged), strict=True):
            stack = alive if mine else dummies
            own += mine
            if letter == "F":
                stack.append(letter)
            elif letter == "B":
                stack.pop()
        assert own == len(letters) and not alive and not dummies
    if len(set(programs)) == 1:
        assert merged == programs[0]
