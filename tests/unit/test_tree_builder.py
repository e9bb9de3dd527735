"""Tries: each shared token once, each emission counted, every path what the engine saw; and what is cut out of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.trajectories import builders
from forge_ray.trajectories.builders import tree as tree_builder
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.split import flat, split, tokens
from forge_ray.trajectories.trajectory import Share, Trajectory, TrajectoryError
from forge_ray.trajectories.tree_rows import Tree, restrict, trees
from forge_ray.trajectories.tree_schema import TREE_SCHEMA
from tests import reference_builders
from tests.built import trajectory
from tests.unit.making import make_call
from tests.unit.random_sessions import steps

Emission = tuple[Any, ...]
"""Rollout, call, tokens before it, token, logprob, version step, temperature, advantage, weight."""


def made(*rollouts: list[Call], span: str = "step") -> list[Tree]:
    """The tries of rollouts `r0`, `r1`, …, everything trained."""
    table = builders.build("tree", [trajectory(calls, rollout=f"r{number}") for number, calls in enumerate(rollouts)], span=span)
    assert table.schema.equals(TREE_SCHEMA, check_metadata=True)
    return trees(table)


def path(tree: Tree, at: int) -> tuple[int, ...]:
    """The tokens visible to token `at`."""
    keys = np.arange(at + 1)
    return tuple(tree.ids[keys[at < tree.sub_end[: at + 1]]].tolist())


def emissions(tree: Tree) -> Counter[Emission]:
    columns = (tree.token, tree.logprobs, tree.steps, tree.temperature, tree.advantage, tree.weight)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return Counter(
        (tree.rollouts[owner], call, path(tree, at), *row)
        for owner, call, at, row in zip(tree.owner.tolist(), tree.call.tolist(), tree.at.tolist(), rows, strict=True)
    )


def expected(calls: list[Call], trajectory: Trajectory) -> Counter[Emission]:
    found: Counter[Emission] = Counter()
    for ordinal, share in trajectory.shares.items():
        call = calls[ordinal]
        for place, (token, logprob, version) in enumerate(zip(call.ids, call.logprobs, call.versions(), strict=True)):
            before = (*call.prompt_ids, *call.ids[:place])
            step = int(version.rpartition(".")[2])
            found[trajectory.rollout, ordinal, before, token, logprob, step, call.temperature, share.advantage, share.weight] += 1
    return found


def well_formed(tree: Tree) -> None:
    size = len(tree)
    assert len(tree.sub_end) == len(tree.position) == size
    assert all(index < end <= size for index, end in enumerate(tree.sub_end))
    assert [len(path(tree, index)) - 1 for index in range(size)] == tree.position.tolist(), "depth, and subtrees nest"
    firsts = [tree.at[tree.owner == owner].min() for owner in range(len(tree.rollouts))]
    assert firsts == sorted(firsts), "rollouts in trie order"
    keys = list(zip(tree.owner.tolist(), tree.call.tolist(), strict=True))
    assert keys == sorted(keys)


# --- by hand -----------------------------------------------------------------------------------------------------------------------


def test_a_retry_a_fork_and_another_rollout_share_what_they_have_in_common() -> None:
    first = [make_call([1, 2], [5, 6], order=0), make_call([1, 2, 5, 6, 7], [8], order=1), make_call([1, 2, 5, 9], [8, 8], order=2)]
    (tree,) = made(first, [make_call([1, 2], [5, 4], order=0)])
    # 1 2 5 ┬ 6 7 8
    #       ├ 9 8 8
    #       └ 4
    assert tree.ids.tolist() == [1, 2, 5, 6, 7, 8, 9, 8, 8, 4]
    assert tree.sub_end.tolist() == [10, 10, 10, 6, 6, 6, 9, 9, 9, 10]
    assert tree.position.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3]
    assert tree.at.tolist() == [1, 2, 4, 6, 7, 1, 2]
    assert tree.token.tolist() == [5, 6, 8, 8, 8, 5, 4], "the 5 that both rollouts sampled is two emissions"
    assert tree.owner.tolist() == [0, 0, 0, 0, 0, 1, 1] and tree.call.tolist() == [0, 0, 1, 2, 2, 0, 0]
    assert tree.rollouts == ["r0", "r1"]


def test_a_call_that_was_recorded_twice_counts_once_and_the_same_reply_of_two_calls_twice() -> None:
    call = make_call([1], [2, 3], order=0)
    (tree,) = made([call, call])
    assert tree.token.tolist() == [2, 3]
    (tree,) = made([call, make_call([1], [2, 3], order=1)])
    assert tree.token.tolist() == [2, 3, 2, 3] and tree.ids.tolist() == [1, 2, 3]


def test_two_prompts_that_begin_differently_are_a_forest() -> None:
    (tree,) = made([make_call([1], [2], order=0), make_call([3], [4], order=1)])
    assert tree.ids.tolist() == [1, 2, 3, 4] and tree.sub_end.tolist() == [2, 2, 4, 4] and tree.position.tolist() == [0, 1, 0, 1]


def test_tokens_of_untrained_calls_are_there_only_as_context() -> None:
    calls = [
        make_call([1], [2], order=0, superseded_by="x"),
        make_call([1], [3], order=1, masked_by_grammar=True),
        make_call([1, 3, 4], [5], order=2),
    ]
    (tree,) = made(calls)
    assert tree.ids.tolist() == [1, 3, 4, 5] and tree.token.tolist() == [5]


def test_rollouts_lie_in_trie_order_and_so_are_they_cut() -> None:
    left = [make_call([1, 2, 3], [4], order=0)]
    right = [make_call([1, 7], [8], order=0)]
    table = builders.build("tree", [trajectory(calls, rollout=f"r{n}") for n, calls in enumerate([left, right, left, right])])
    (tree,) = trees(table)
    assert tree.rollouts == ["r0", "r2", "r1", "r3"], "neighbours share most"
    first, second = (trees(part)[0] for part in split(table, 2))
    assert (first.rollouts, first.ids.tolist()) == (["r0", "r2"], [1, 2, 3])
    assert (second.rollouts, second.ids.tolist()) == (["r1", "r3"], [1, 7])
    assert tokens(table) == (4, 4)


def test_nothing_trained_is_no_row() -> None:
    idle = Trajectory("a", [])
    for span in ("step", "rollout"):
        table = builders.build("tree", [idle], span=span)
        assert table.num_rows == 0 and table.schema.equals(TREE_SCHEMA, check_metadata=True)
        assert [part.num_rows for part in split(table, 2)] == [0, 0]
        assert tokens(table) == (0, 0)


# --- any step ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(steps(), st.sampled_from(["step", "rollout"]))
def test_every_emission_once_behind_exactly_what_the_engine_saw(step: list[tuple[list[Call], Trajectory]], span: str) -> None:
    rows = trees(builders.build("tree", [one for _, one in step], span=span))
    assert sum(map(emissions, rows), Counter()) == sum((expected(calls, one) for calls, one in step), Counter())
    for tree in rows:
        well_formed(tree)
    trained = [(calls, set(one.shares)) for calls, one in step if one.shares]
    members = [trained] if span == "step" and trained else [[one] for one in trained]
    assert [len(tree) for tree in rows] == [_size(reference_builders.tree(one)) for one in members], "no token more than once"
    paths = [{path(tree, index) for index in range(len(tree))} for tree in rows]
    for row, one in enumerate(members):
        whole = {(*calls[ordinal].prompt_ids, *calls[ordinal].ids) for calls, chosen in one for ordinal in chosen}
        assert whole <= paths[row], "prompt and reply of each call are a path"


@settings(max_examples=80, deadline=None)
@given(steps(), st.data())
def test_the_trie_of_fewer_rollouts_has_their_emissions_and_no_token_too_many(step: list[Any], data: st.DataObject) -> None:
    for tree in trees(builders.build("tree", [one for _, one in step])):
        owners = sorted(data.draw(st.sets(st.integers(0, len(tree.rollouts) - 1))))
        part = restrict(tree, owners)
        names = {tree.rollouts[owner] for owner in owners}
        assert emissions(part) == Counter({one: n for one, n in emissions(tree).items() if one[0] in names and one[-1] > 0})
        assert part.rollouts == [name for name in tree.rollouts if name in names]
        assert all(((index <= part.at) & (part.at < end)).any() for index, end in enumerate(part.sub_end)), "each is needed"
        assert [len(path(part, index)) - 1 for index in range(len(part))] == part.position.tolist()


@settings(max_examples=80, deadline=None)
@given(steps(), st.integers(1, 4), st.sampled_from(["step", "rollout"]))
def test_the_shares_of_the_ranks_hold_each_emission_in_the_loss_once(step: list[Any], parts: int, span: str) -> None:
    table = builders.build("tree", [one for _, one in step], span=span)
    shares = split(table, parts)
    assert len(shares) == parts and all(part.schema.equals(TREE_SCHEMA, check_metadata=True) for part in shares)
    found = [emissions(tree) for part in shares for tree in trees(part)]
    whole = sum(map(emissions, trees(table)), Counter())
    assert sum(found, Counter()) == Counter({one: n for one, n in whole.items() if one[-1] > 0})
    rollouts = [[name for tree in trees(part) for name in tree.rollouts] for part in shares]
    named = [name for part in rollouts for name in part]
    assert len(named) == len(set(named)), "whole rollouts"
    if span == "step":
        assert max(map(len, rollouts)) - min(map(len, rollouts)) <= 1
    assert tokens(table)[1] == sum(sum(one.values()) for one in found)
    assert parts > 1 or tokens(table)[0] == sum(len(flat(part, "ids")) for part in shares)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=6), max_size=5))
def test_demonstrations_share_their_beginnings_and_train_what_their_masks_say(rows: list[list[tuple[int, bool]]]) -> None:
    ids = [np.array([token for token, _ in row], np.int64) for row in rows]
    places = [np.array([place for place, (_, mask) in enumerate(row) if mask and place], np.int64) for row in rows]
    found = trees(tree_builder.of_sequences(ids, places))
    expected: Counter[tuple[str, tuple[int, ...], int]] = Counter()
    for number, row in enumerate(rows):
        text = [token for token, _ in row]
        expected.update((str(number), tuple(text[:place]), text[place]) for place in range(1, len(row)) if row[place][1])
    assert len(found) == bool(expected)
    for tree in found:
        well_formed(tree)
        emitted = zip(tree.owner.tolist(), tree.at.tolist(), tree.token.tolist(), strict=True)
        assert Counter((tree.rollouts[owner], path(tree, at), token) for owner, at, token in emitted) == expected
        assert set(tree.weight.tolist()) == set(tree.advantage.tolist()) == {1.0} and set(tree.steps.tolist()) == {-1}
        assert all(map(math.isnan, tree.rewards))


def test_two_turns_of_a_demonstration_are_two_calls() -> None:
    (tree,) = trees(tree_builder.of_sequences([np.arange(1, 6)], [np.array([1, 2, 4])]))
    assert tree.token.tolist() == [2, 3, 5] and tree.call.tolist() == [0, 0, 1]
    with pytest.raises(TrajectoryError, match="sequence 0: nothing predicts its first token"):
        tree_builder.of_sequences([np.arange(3)], [np.array([0, 2])])


def test_advantages_and_weights_are_an_emissions_own() -> None:
    one, two = trajectory([make_call([1], [2], order=0)], rollout="a"), trajectory([make_call([1], [2], order=0)], rollout="b")
    one.shares, two.shares = {0: Share(0.5, 1.0)}, {0: Share(-0.5, 0.0)}
    (tree,) = trees(builders.build("tree", [one, two]))
    assert tree.advantage.tolist() == [0.5, -0.5] and tree.weight.tolist() == [1, 0] and tree.trained == 1


def _size(node: reference_builders.Node) -> int:
    return sum(1 + _size(child) for child in node.children.values())
