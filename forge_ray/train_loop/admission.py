"""Admission: how many rollouts may start, and which finished groups a step consumes. Pure functions; the driver holds the numbers.

Admission keeps the number of started rollouts within what the next `max_staleness + 1` steps can use, so that a rollout that ends in
time is fresh enough. A long one may not end in time: the exact test is made on its tokens when it is consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


def capacity(*, max_in_flight: int, running: int, accepted: int, version: int, max_staleness: int, batch: int) -> int:
    """Rollouts that may start now; never negative.

    `running`: admitted and not ended, waiting ones included. `accepted`: ended and trainable so far, those of the `version` trained
    steps included, those that were dropped (stale, replaced) not: what is dropped must be made again. `batch`: rollouts of one step.
    """
    return max(0, min(max_in_flight - running, (max_staleness + version + 1) * batch - (accepted + running)))


def groups_to_start(
    *, max_in_flight: int, running: int, accepted: int, version: int, max_staleness: int, groups_per_step: int, group_size: int
) -> int:
    """Whole groups that may start now; a group is never admitted in part.

    Count a group in `accepted` with `group_size`, also where rollouts of it were dropped: a step takes groups. A group larger
    than `max_in_flight` is admitted alone, when nothing runs: else nothing ever would.
    """
    free = capacity(
        max_in_flight=max(max_in_flight, group_size),
        running=running,
        accepted=accepted,
        version=version,
        max_staleness=max_staleness,
        batch=groups_per_step * group_size,
    )
    return free // group_size


@dataclass
class Taken(Generic[T]):
    """What becomes of the groups that were ready."""

    batch: list[T] = field(default_factory=list)
    """The next step's, `size` of them, or none."""
    waiting: list[T] = field(default_factory=list)
    """Fresh enough, for a later step."""
    stale: list[T] = field(default_factory=list)
    """Over the bound: to be dropped and counted. The version only grows, so they never become fresh."""


def take(ready: Sequence[T], *, staleness: Callable[[T], int], max_staleness: int, size: int) -> Taken[T]:
    """Choose a step's groups from `ready`, which are in order of arrival.

    `staleness` is a group's exact one, now (`batch.group_staleness`). The stalest within the bound go first, arrival decides between
    equals: nothing grows too old behind something fresher.
    """
    ages = [staleness(group) for group in ready]
    fresh = [index for index, age in enumerate(ages) if age <= max_staleness]
    stale = [ready[index] for index, age in enumerate(ages) if age > max_staleness]
    if len(fresh) < size:
        return Taken([], [ready[index] for index in fresh], stale)
    chosen = set(sorted(fresh, key=lambda index: (-ages[index], index))[:size])
    return Taken(
        [ready[index] for index in fresh if index in chosen],
        [ready[index] for index in fresh if index not in chosen],
        stale,
    )
