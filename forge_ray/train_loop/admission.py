"""Admission: how many rollouts may start, and which finished groups a step consumes. Pure functions; `job/flow.py` holds the numbers.

Admission keeps the number of started rollouts within what the next `max_staleness + 1` steps can use:

    capacity = min(max_in_flight − running, (max_staleness + version + 1) · batch − (accepted + running))

Consumed in the order of admission, none would ever be older than `max_staleness` when it is trained. Consumed as they end, a long one
may be overtaken and grow too old: the exact test is made on its tokens, at consumption. `train.on_stale` says what follows from it:

- `wait`: a step is not taken while that would leave more groups behind than the later steps can take in time. The trainer waits for the
  slow group; nothing is thrown away, and long rollouts are trained like short ones. The test is Hall's condition for unit tasks with
  deadlines: with n_j groups that must be consumed within the j steps after this one, n_j ≤ j · size for every j.
- `drop`: a step takes what is ready; what grows too old is dropped, counted and replaced. The trainer never waits for one slow group.

Waiting after a group became too old is no choice: the version only grows. Such a group is dropped under `wait` as well; only a run that
is resumed with a smaller bound, or a rollout that is tried again, can have one.
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
class Choice(Generic[T]):
    """What becomes of the groups that were ready."""

    batch: list[T] = field(default_factory=list)
    """The next step's, `size` of them, or none."""
    waiting: list[T] = field(default_factory=list)
    """Fresh enough, for a later step."""
    stale: list[T] = field(default_factory=list)
    """Over the bound: to be dropped and counted. The version only grows, so they never become fresh."""
    held: bool = False
    """There are enough for a step, but it waits for a slow group."""


def choose(
    ready: Sequence[T], *, staleness: Callable[[T], int], max_staleness: int, size: int, under_way: Sequence[int] | None = None
) -> Choice[T]:
    """Choose a step's groups from `ready`, which are in order of arrival.

    `staleness` is a group's exact one, now (`batch.group_staleness`). The stalest within the bound go first, arrival decides between
    equals: nothing grows too old behind something fresher. `under_way`: for `wait`, the ages (version − the oldest that a token of it may
    have) of the groups that have begun and are not complete; None for `drop`.
    """
    ages = [staleness(group) for group in ready]
    fresh = [index for index, age in enumerate(ages) if age <= max_staleness]
    stale = [ready[index] for index, age in enumerate(ages) if age > max_staleness]
    order = sorted(fresh, key=lambda index: (-ages[index], index))
    chosen = set(order[:size])
    held = len(fresh) >= size and _must_wait(
        [max_staleness - ages[index] for index in order[:size]],
        [max_staleness - ages[index] for index in order[size:]],
        [max_staleness - age for age in under_way or () if age <= max_staleness],
        size,
    )
    if len(fresh) < size or held:
        return Choice([], [ready[index] for index in fresh], stale, held)
    return Choice(
        [ready[index] for index in fresh if index in chosen],
        [ready[index] for index in fresh if index not in chosen],
        stale,
    )


def _must_wait(batch: Sequence[int], left: Sequence[int], under_way: Sequence[int], size: int) -> bool:
    """Whether taking `batch` now leaves more than the later steps can take in time, and waiting for one of `under_way` can help.

    All are slacks: the steps after this one by the end of which a group must have been taken, at least 0.
    """
    for steps in sorted(set(under_way)):
        due = sum(slack <= steps for slack in (*left, *under_way))
        if due > steps * size and max(batch) > steps:
            return True
    return False
