"""Which rollouts are wanted, which have come, which groups can be trained: a state machine without Ray and without a clock.

A group is `train.group_size` rollouts of one (task, harness) pair, or (`train.advantage.group_by: task`) of one task, whose slots go round
over the harnesses. Group g's pair follows from the seed alone, so a resumed run goes on with the same pairs; a group that has begun keeps
its own, which its records tell. Invariants:

- a group is admitted whole; `admitted − finished` counts what is queued or running;
- each slot of a group ends exactly once: with a record that is trained, or dropped after its retries;
- a group is complete when every slot has ended; it is ready if enough records may be trained to compare one with another: a group that
  shrank to one rollout has no baseline, and is replaced like one that lost all;
- a rollout is used by at most one step: a taken group never comes back.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from forge_ray.config import Config
from forge_ray.outcome import Treatment, treatment
from forge_ray.rollout import RolloutRecord, RolloutRequest
from forge_ray.trajectories.advantage import STEP_WIDE


@dataclass(frozen=True)
class TaskRef:
    """A task as the scheduler knows it."""

    name: str
    path: str


@dataclass
class Group:
    """One group and its slots, by slot number."""

    index: int
    task: TaskRef
    harnesses: tuple[str, ...]
    """By slot."""
    accepted: dict[int, RolloutRecord] = field(default_factory=dict)
    dropped: dict[int, RolloutRecord] = field(default_factory=dict)
    cancelled: bool = False
    """A record said `drop_group`."""
    begun_at: int | None = None
    """Version when its first rollout was launched, or the oldest its stored tokens have: none of its tokens is older. None: not begun."""

    @property
    def size(self) -> int:
        return len(self.harnesses)

    @property
    def ended(self) -> int:
        """Slots that have ended."""
        return len(self.accepted) + len(self.dropped)

    @property
    def complete(self) -> bool:
        return self.ended >= self.size

    @property
    def records(self) -> list[RolloutRecord]:
        """Records to train, by slot."""
        return [] if self.cancelled else [self.accepted[slot] for slot in sorted(self.accepted)]

    def key(self, slot: int) -> str:
        return f"g{self.index:05d}-{slot}"

    def request(self, slot: int, attempt: int) -> RolloutRequest:
        return RolloutRequest(
            key=self.key(slot),
            purpose="train",
            task=self.task.path,
            task_name=self.task.name,
            harness=self.harnesses[slot],
            group=self.index,
            attempt=attempt,
        )


def pair(index: int, tasks: list[TaskRef], harnesses: list[str], seed: int) -> tuple[TaskRef, str]:
    """The (task, harness) of group `index`: epochs over all pairs, each in an order of its own."""
    pairs = [(task, harness) for task in tasks for harness in harnesses]
    epoch, place = divmod(index, len(pairs))
    random.Random(f"{seed}/{epoch}").shuffle(pairs)
    return pairs[place]


class Scheduler:
    """The groups of a run."""

    def __init__(self, config: Config, tasks: list[TaskRef]) -> None:
        self._config = config
        self._tasks = tasks
        self._harnesses = [harness.name for harness in config.harnesses if not config.taught(harness)]
        self._open: dict[int, Group] = {}
        self._ready: list[Group] = []
        self._next = 0
        self._first_attempt: dict[str, int] = {}
        self._waiting: list[RolloutRequest] = []
        self.accepted = 0
        """Ended slots so far, trained ones and dropped rollouts of a living group included (a step takes groups), dropped groups' not."""
        self.running = 0
        """Admitted and not ended: queued or in flight."""
        self.stale_groups = 0
        self.empty_groups = 0
        """Complete groups with nothing to train: dropped ones, and those that shrank to fewer than two rollouts."""
        self.resampled_groups = 0
        """Complete groups that say nothing and were replaced (`train.dynamic_sampling`)."""
        self.treated: dict[str, int] = {}
        """What became of the rollouts that ended, by treatment; a `retry` that has no attempt left is a `drop`. The caller may empty it."""
        self.unused = 0
        """Rollouts fit to be trained that no step will train, because their group was dropped, shrank, grew stale or was replaced."""
        # With a baseline that is the whole step's, one rollout is enough.
        self._least = 1 if config.train.advantage.name in STEP_WIDE else 2

    def restore(self, records: Iterable[RolloutRecord], trained_groups: Iterable[int], resampled: Iterable[int] = ()) -> None:
        """Take up a stopped run: `records` are its stored training rollouts, `trained_groups` those that a step batch holds, `resampled`
        those that were replaced when one was formed. `treated` counts them all then."""
        trained, replaced = set(trained_groups), set(resampled)
        by_group: dict[int, list[RolloutRecord]] = {}
        for record in records:
            if record.group is not None:
                by_group.setdefault(record.group, []).append(record)
        self._next = max([-1, *by_group, *trained]) + 1
        for index in range(self._next):
            group = self._begun(index, by_group.get(index, []))
            for record in sorted(by_group.get(index, []), key=lambda r: r.attempt):
                self._counted(group, record)
            if index in replaced:
                self.resampled_groups += 1
                self.unused += len(group.records)
                continue
            self.accepted += group.ended
            if index in trained:
                continue
            if group.complete:
                self._close(group)
                continue
            self._open[index] = group
            for slot in range(group.size):
                if slot not in group.accepted and slot not in group.dropped:
                    self._admit(group.request(slot, self._first_attempt.get(group.key(slot), 0)))

    def admit_group(self) -> None:
        """Queue the rollouts of one further group."""
        group = self._group(self._next)
        self._open[self._next] = group
        self._next += 1
        for slot in range(group.size):
            self._admit(group.request(slot, 0))

    def launchable(self, free: int, version: int | None = None) -> list[RolloutRequest]:
        """Up to `free` queued requests, oldest first; they count as running until `finish`. `version`: what their tokens begin with."""
        taken, self._waiting = self._waiting[: max(free, 0)], self._waiting[max(free, 0) :]
        if version is not None:
            for request in taken:
                self.began(request.group, version)
        return taken

    def began(self, index: int | None, version: int) -> None:
        """A rollout of the open group `index` has, or may soon have, tokens of `version`."""
        group = self._open.get(-1 if index is None else index)
        if group is not None:
            group.begun_at = version if group.begun_at is None else min(group.begun_at, version)

    @property
    def waiting(self) -> int:
        """Queued, not launched."""
        return len(self._waiting)

    @property
    def claimed(self) -> int:
        """Groups that have been, or may still be, part of a step: admitted ones without the dropped and the empty."""
        return self._next - self.stale_groups - self.empty_groups - self.resampled_groups

    def finish(self, record: RolloutRecord) -> None:
        """A launched rollout has ended: it is accepted, dropped, or queued for another attempt."""
        assert record.group is not None
        group = self._open[record.group]
        self.running -= 1
        before = group.ended
        retry = self._counted(group, record)
        self.accepted += group.ended - before
        if retry is not None:
            self._admit(retry, first=True)
        if group.complete:
            del self._open[group.index]
            self._close(group)

    def open_groups(self) -> list[Group]:
        """Admitted groups that are not complete, in the order of admission."""
        return list(self._open.values())

    def under_way(self) -> list[Group]:
        """Those of them that have begun."""
        return [group for group in self._open.values() if group.begun_at is not None]

    def ready(self) -> list[Group]:
        """Complete groups with something to train, in the order of completion."""
        return list(self._ready)

    def take(self, groups: Iterable[Group]) -> None:
        """These groups go into a step batch."""
        self._remove(groups)

    def drop_stale(self, groups: Iterable[Group]) -> None:
        """These groups are too old to be trained: they are counted and replaced by new ones."""
        self.stale_groups += self._replace(groups)

    def resample(self, groups: Iterable[Group]) -> None:
        """These groups say nothing: they are counted and replaced by new ones."""
        self.resampled_groups += self._replace(groups)

    def _replace(self, groups: Iterable[Group]) -> int:
        removed = self._remove(groups)
        for group in removed:
            self.accepted -= group.ended
            self.unused += len(group.records)
        return len(removed)

    def _remove(self, groups: Iterable[Group]) -> list[Group]:
        gone = {group.index for group in groups}
        removed = [group for group in self._ready if group.index in gone]
        self._ready = [group for group in self._ready if group.index not in gone]
        return removed

    def _group(self, index: int) -> Group:
        size, seed, known = self._config.train.group_size, self._config.seed, self._harnesses
        if self._config.train.advantage.group_by == "task":
            task, _ = pair(index, self._tasks, [""], seed)
            # From another one on in each group: where they do not divide the size, none is always the one left out.
            return Group(index, task, tuple(known[(index + slot) % len(known)] for slot in range(size)))
        task, harness = pair(index, self._tasks, known, seed)
        return Group(index, task, (harness,) * size)

    def _begun(self, index: int, records: list[RolloutRecord]) -> Group:
        """Group `index` with the pair that its records have; the task's place is today's, where there still is such a task."""
        group = self._group(index)
        if records:
            first = records[0]
            here = {task.name: task for task in self._tasks}
            group.task = here.get(first.task_name, TaskRef(first.task_name, first.task))
            told = {int(record.key.rpartition("-")[2]): record.harness for record in records}
            if self._config.train.advantage.group_by == "task_harness":
                told = dict.fromkeys(range(group.size), first.harness)
            group.harnesses = tuple(told.get(slot, planned) for slot, planned in enumerate(group.harnesses))
        return group

    def _admit(self, request: RolloutRequest, *, first: bool = False) -> None:
        self.running += 1
        self._waiting.insert(0, request) if first else self._waiting.append(request)

    def _counted(self, group: Group, record: RolloutRecord) -> RolloutRequest | None:
        """`_take_in`, noted in `treated`."""
        retry = self._take_in(group, record)
        became = Treatment.RETRY if retry is not None else self._treatment(record)
        became = Treatment.DROP if retry is None and became is Treatment.RETRY else became
        self.treated[became] = self.treated.get(became, 0) + 1
        return retry

    def _take_in(self, group: Group, record: RolloutRecord) -> RolloutRequest | None:
        """Place `record` in its group; the request of the next attempt if there shall be one."""
        slot = int(record.key.rpartition("-")[2])
        self._first_attempt[record.key] = record.attempt + 1
        if slot in group.accepted:
            return None
        rollouts, todo = self._config.rollouts, self._treatment(record)
        if todo is Treatment.TRAIN:
            if record.reward is None:
                raise ValueError(f"{record.id} ended {record.outcome} without a reward and cannot be trained")
            group.dropped.pop(slot, None)
            group.accepted[slot] = record
        elif todo is Treatment.RETRY and record.attempt < rollouts.retries:
            return group.request(slot, record.attempt + 1)
        else:
            group.dropped[slot] = record
            group.cancelled = group.cancelled or todo is Treatment.DROP_GROUP
        return None

    def _treatment(self, record: RolloutRecord) -> Treatment:
        return treatment(record.outcome, self._config.rollouts.preset, self._config.rollouts.on_outcome)

    def _close(self, group: Group) -> None:
        if len(group.records) >= self._least:
            self._ready.append(group)
        else:
            self.empty_groups += 1
            self.unused += len(group.accepted)
            self.accepted -= group.ended
