"""Admission: the capacity formula by hand, the choice at consumption, and a simulated run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.train_loop.admission import capacity, groups_to_start, take


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
    taken = take(list(ages), staleness=ages.__getitem__, max_staleness=2, size=3)
    assert (taken.batch, taken.waiting, taken.stale) == (["a", "c", "e"], ["d"], ["b"])


def test_a_step_with_too_few_groups_waits_and_still_drops() -> None:
    ages = {"a": 0, "b": 3, "c": 1}
    taken = take(list(ages), staleness=ages.__getitem__, max_staleness=1, size=3)
    assert (taken.batch, taken.waiting, taken.stale) == ([], ["a", "c"], ["b"])
    assert take([], staleness=ages.__getitem__, max_staleness=1, size=1).batch == []


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 20),
    st.lists(st.integers(1, 9), min_size=40, max_size=40),
    st.booleans(),
)
def test_a_run_never_stands_still_and_never_trains_over_the_bound(
    groups_per_step: int, group_size: int, max_staleness: int, max_in_flight: int, durations: list[int], slow_tail: bool
) -> None:
    """Groups with any durations against a trainer that takes a batch whenever there is one; the clock is a loop."""
    running: dict[int, tuple[int, int]] = {}  # group -> (ends at, version at start)
    ready: list[int] = []
    began: dict[int, int] = {}
    accepted = version = started = dropped = 0
    steps = 6
    for now in range(4000):
        for group in [group for group, (end, _) in running.items() if end <= now]:
            began[group] = running.pop(group)[1]
            ready.append(group)
            accepted += group_size
        ages = {group: version - began[group] for group in ready}
        taken = take(ready, staleness=ages.__getitem__, max_staleness=max_staleness, size=groups_per_step)
        accepted -= group_size * len(taken.stale)
        dropped += len(taken.stale)
        ready = taken.waiting
        if taken.batch:
            assert max(ages[group] for group in taken.batch) <= max_staleness
            version += 1
            if version == steps:
                break
        free = groups_to_start(
            max_in_flight=max_in_flight,
            running=len(running) * group_size,
            accepted=accepted,
            version=version,
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
            group_size=group_size,
        )
        for _ in range(free):
            length = durations[started % len(durations)] * (40 if slow_tail and started % 7 == 0 else 1)
            running[started] = (now + length, version)
            started += 1
        assert len(running) * group_size <= max(max_in_flight, group_size)
        assert running or ready, "something is always under way"
    assert version == steps
    assert started <= (steps + max_staleness) * groups_per_step + dropped, "no more is started than the bound allows to be used"
