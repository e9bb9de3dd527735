"""Flow: the scheduler, the admission and the choice at consumption, as one object. No Ray, no clock, no tokens.

The driver asks it what to launch and what a step trains, tells it what ended, and keeps the time; the benchmark of asynchrony drives it on
a virtual clock instead. Invariants:

- at most `rollouts.max_in_flight` are launched at a time, and admitted ones are within `train.max_staleness` (`train_loop/admission.py`);
- a group is admitted as soon as its first rollout can be launched: the rest of it waits in the queue for the next free places. Held back
  until all of it fits, up to `group_size − 1` places would stand empty for want of one;
- nothing is trained that is older than the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from forge_ray.config import Config
from forge_ray.job.scheduler import Group, Scheduler, TaskRef
from forge_ray.rollout import RolloutRecord, RolloutRequest
from forge_ray.train_loop.admission import Choice, choose, groups_to_start


class Flow:
    """Rollouts on their way from admission to a step."""

    def __init__(self, config: Config, tasks: list[TaskRef]) -> None:
        self._train, self._limit = config.train, config.rollouts.max_in_flight
        self.scheduler = Scheduler(config, tasks)
        self.in_flight = 0
        """Launched and not ended."""
        self.outcomes: dict[str, int] = {}
        """Rollouts that ended since the last batch, by outcome."""
        self.resampled: list[int] = []
        """Groups that were replaced since the last batch, because they say nothing."""

    def restore(self, records: Iterable[RolloutRecord], batches: Iterable[Mapping[str, Any]]) -> None:
        """Take up a stopped run: its stored training rollouts, and what is known of its stored batches (`StepBatches.stats`). What ended
        since the last of them goes into the next one's counts."""
        ended, told = list(records), list(batches)
        trained = {index for stats in told for index in stats["taken"]}
        resampled = {index for stats in told for index in stats.get("resampled", ())}
        self.scheduler.restore(ended, trained, resampled)
        outcomes, treated = Counter(str(record.outcome) for record in ended), Counter(self.scheduler.treated)
        for stats in told:
            outcomes.subtract(stats["outcomes"])
            treated.subtract(stats.get("treatments", {}))
        self.outcomes, self.scheduler.treated = dict(+outcomes), dict(+treated)

    def launch(self, version: int, *, replays: int = 0) -> list[RolloutRequest]:
        """Rollouts to start now that `version` is served, in order; each must come back through `finish`, or `lost`.

        `replays`: steps from `version` on whose batches exist already, because a checkpoint does not hold them. While they are more than
        the bound nothing is launched: what began now would be too old for the first new batch, and spoil the finished rollouts of its
        group with it.
        """
        train, scheduler = self._train, self.scheduler
        launched: list[RolloutRequest] = []
        if replays > train.max_staleness:
            return launched
        while True:
            new = scheduler.launchable(self._limit - self.in_flight, version)
            self.in_flight += len(new)
            launched += new
            room = groups_to_start(
                # `max_in_flight` bounds what is launched, above; the staleness bounds what is admitted.
                max_in_flight=scheduler.running + train.group_size,
                running=scheduler.running,
                accepted=scheduler.accepted,
                version=version,
                max_staleness=train.max_staleness,
                groups_per_step=train.groups_per_step,
                group_size=train.group_size,
            )
            if self.in_flight >= self._limit or not room or scheduler.claimed >= train.steps * train.groups_per_step:
                return launched
            scheduler.admit_group()

    def lost(self) -> None:
        """A launched rollout will not end: the run is being stopped."""
        self.in_flight -= 1

    def finish(self, record: RolloutRecord) -> list[Group]:
        """A launched rollout has ended; the group that it made ready, if it did."""
        self.in_flight -= 1
        self.outcomes[record.outcome] = self.outcomes.get(record.outcome, 0) + 1
        before = {group.index for group in self.scheduler.ready()}
        self.scheduler.finish(record)
        return [group for group in self.scheduler.ready() if group.index not in before]

    def sift(self, groups: Iterable[Group], silent: Callable[[Group], bool]) -> tuple[list[Group], list[Group]]:
        """`groups` without those that say nothing, and those: with `train.dynamic_sampling` they are replaced here, up to
        `train.max_resampled_groups` for a step."""
        ready = list(groups)
        left = self._train.max_resampled_groups - len(self.resampled) if self._train.dynamic_sampling else 0
        gone = [group for group in ready if silent(group)][:left] if left > 0 else []
        self.scheduler.resample(gone)
        self.resampled += [group.index for group in gone]
        return [group for group in ready if group not in gone], gone

    def take(self, version: int, groups: Iterable[Group], staleness: Callable[[Group], int]) -> Choice[Group]:
        """What step `version` trains, out of the ready `groups`. `staleness`: a group's exact one, now.

        The stale ones are dropped here; the batch is the caller's to keep, and to confirm with `used`.
        """
        waits = self._train.on_stale == "wait"
        choice = choose(
            list(groups),
            staleness=staleness,
            max_staleness=self._train.max_staleness,
            size=self._train.groups_per_step,
            under_way=[version - (group.begun_at or 0) for group in self.scheduler.under_way()] if waits else None,
        )
        self.scheduler.drop_stale(choice.stale)
        return choice

    def used(self, batch: Iterable[Group]) -> None:
        """These groups are a step's batch, which is kept."""
        self.scheduler.take(batch)
        self.outcomes, self.resampled, self.scheduler.treated = {}, [], {}
