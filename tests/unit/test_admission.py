"""Admission: the capacity formula by hand, the choice at consumption, and a simulated run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.train_loop.admission import capacity, choose, groups_to_start


@pytest.mark.parametrize(
    ("free", "numbers"),
    [
        (16, {"max_in_flight": 16, "running": 0, "accepted": 0, "version": 0, "max_staleness": 1, "batch": 64}),
        (10, {"max_in_flight": 16, "running": 6, "accepted": 0, "version": 0, "max_staleness": 1, "batch": 64}),
        (3, {"max_in_flight": 16, "running": 5, "accepted": 120, "version": 0, "max_staleness": 1, "batch": 64}),  # (1 + 0 + 1) * 64 - 125
        (0, {"max_in_flight": 16, "running": 8, "accepted": 120, "version": 0, "max_staleness": 1, "batch": 64}),
        (16, {"max_in_flight": 16, "running": 0, "accepted": 120, "version": 1, "max_staleness": 1, "batch": 64}),
        (
            4,
            {"max_in_flight": 99, "running": 0, "accepted": 60, "version": 0, "max_staleness": 0, "batch": 64},
        ),  # synchronous: this step's only
        (0, {"max_in_flight": 4, "running": 9, "accepted": 0, "version": 0, "max_staleness": 0, "batch": 64}),
    ],
)
def test_capacity(free: int, numbers: dict[str, int]) -> None:
    assert capacity(**numbers) == free


def test_groups_start_whole() -> None:
    numbers: dict[str, Any] = {"accepted": 0, "version": 0, "max_staleness": 0, "groups_per_step": 2, "group_size": 8}
    assert groups_to_start(max_in_flight=15, running=0, **numbers) == 1
    assert groups_to_start(max_in_flight=16, running=0, **numbers) == 2
    assert groups_to_start(max_in_flight=16, running=1, **numbers) == 1
    assert groups_to_start(max_in_flight=99, running=0, **numbers) == 2
    assert groups_to_start(max_in_flight=4, running=0, **numbers) == 1, "a group larger than the bound must still run some day"
    assert groups_to_start(max_in_flight=4, running=1, **numbers) == 0


def test_a_step_takes_the_stalest_within_the_bound_and_drops_what_is_over_it() -> None:
    ages = {"a": 0, "b": 3, "c": 1, "d": 0, "e": 2}
    choice = choose(list(ages), staleness=ages.__getitem__, max_staleness=2, size=3)
    assert (choice.batch, choice.waiting, choice.stale) == (["a", "c", "e"], ["d"], ["b"])


def test_a_step_with_too_few_groups_waits_and_still_drops() -> None:
    ages = {"a": 0, "b": 3, "c": 1}
    choice = choose(list(ages), staleness=ages.__getitem__, max_staleness=1, size=3)
    assert (choice.batch, choice.waiting, choice.stale) == ([], ["a", "c"], ["b"])
    assert choose([], staleness=ages.__getitem__, max_staleness=1, size=1).batch == []


@pytest.mark.parametrize(
    ("ready", "under_way", "batch"),
    [
        ([0, 0, 0], [2], None),  # the slow group must be in this step, and is not there
        ([2, 2, 0], [2], [2, 2]),  # there is no place for it in this step anyway
        ([2, 1, 0], [1, 1], [2, 1]),  # two slow groups that the next step can take
        ([2, 0, 0], [1, 1, 1], None),  # three of which it can take two
        ([1, 1, 1], [1, 1], [1, 1]),  # too many for the next step, but all as urgent: waiting would not help
        ([0, 0], [0, 0, 0, 0], [0, 0]),  # four of which the next two steps can take all
        ([0, 0], [3], [0, 0]),  # it is too old already: nobody waits for it
        ([1], [], None),
    ],
)
def test_a_step_waits_for_a_slow_group_where_that_can_help(ready: list[int], under_way: list[int], batch: list[int] | None) -> None:
    choice = choose(ready, staleness=lambda age: age, max_staleness=2, size=2, under_way=under_way)
    assert choice.batch == (batch or []) and choice.held == (batch is None and len(ready) >= 2)
    assert sorted([*choice.batch, *choice.waiting]) == sorted(ready)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 999),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_capacity_is_the_most_that_breaks_neither_bound(
    free_slots: int, running: int, accepted: int, version: int, max_staleness: int, batch: int
) -> None:
    numbers = {"running": running, "accepted": accepted, "version": version, "max_staleness": max_staleness, "batch": batch}
    room = capacity(max_in_flight=running + free_slots, **numbers)
    usable = (max_staleness + version + 1) * batch

    def fits(more: int) -> bool:
        return more <= free_slots and accepted + running + more <= usable

    assert room == 0 or fits(room)
    assert not fits(room + 1)
