"""Step batches: out of the ready groups, onto disk, to the trainer.

Invariants: the batch of step k is formed once, while the version is k; it lies on disk before it is offered, so that a run that starts
again trains the same batch; one batch is out at a time.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from forge_ray.config import Config
from forge_ray.job import library, store
from forge_ray.job.flow import Flow
from forge_ray.job.rating import Rater, store_ratings
from forge_ray.job.scheduler import Group
from forge_ray.job.step_report import reward_figures
from forge_ray.run_dir import RunDir


class StepBatches:
    """The batches of a run; `flow` says which groups a step takes."""

    def __init__(self, config: Config, run: RunDir, flow: Flow, exchange: Any, rater: Rater | None = None) -> None:
        self._config, self._flow, self._exchange = config, flow, exchange
        self._samples, self._location = store.samples(config, run), store.location(config, run)
        self._rater = rater
        self._rated: dict[int, list[Any]] = {}
        """Group index → what a served teacher says of its calls, if there is one."""
        self._recordings = library.Recordings(run, train_grammar_calls=config.proxy.train_grammar_calls)
        self._built: dict[int, list[Any]] = {}
        """Group index → its rollouts as a batch takes them (`batch.Taken`), once complete."""
        self._silent: dict[int, bool] = {}
        """Group index → whether a step would learn nothing from it; asked with `train.dynamic_sampling` only."""
        self._held_since: float | None = None
        self.offered: int | None = None
        """Step whose batch the trainer has."""

    def every_stats(self) -> list[dict[str, Any]]:
        """What is known of each stored batch, by step."""
        return [self._samples.stats(step) for step in sorted(self._samples.steps)]

    def replays(self, version: int) -> int:
        """Steps from `version` on whose batch is stored already."""
        number = 0
        while version + number in self._samples.steps:
            number += 1
        return number

    def stats(self, step: int) -> dict[str, Any]:
        """What is known of the stored batch of `step`."""
        return self._samples.stats(step)

    async def build(self, group: Group) -> None:
        """Read the calls of a complete group."""
        from forge_ray.trajectories import batch

        built = await asyncio.to_thread(self._recordings.with_calls, group.records)
        # A `Call` holds its whole prompt; what waits for its step holds each token once.
        taken = await asyncio.to_thread(batch.take, built, self._config.train)
        if self._config.train.dynamic_sampling:
            alone = await asyncio.to_thread(batch.form, [taken], self._config.train)
            self._silent[group.index] = not alone.stats["tokens_trained"]
        if self._rater is not None:
            self._rated[group.index] = await self._rater.rate(built)
        self._built[group.index] = taken

    async def date(self, group: Group, version: int) -> None:
        """Find out how old the stored rollouts of a group are that goes on after a restart at `version`."""
        from forge_ray.trajectories import batch

        if group.records:
            built = await asyncio.to_thread(self._recordings.with_calls, group.records)
            taken = await asyncio.to_thread(batch.take, built, self._config.train)
            self._flow.scheduler.began(group.index, version - batch.group_staleness(taken, version))

    def forget(self, records: list[Any]) -> None:
        """The recordings of these rollouts will not be asked for again."""
        self._recordings.done(records)

    async def offer(self, version: int) -> bool:
        """Give the trainer the batch of `version`, if it does not have it and there are enough groups; whether something was dropped."""
        if self.offered == version:
            return False
        if version not in self._samples.steps:
            formed, dropped = await self._form(version)
            if not formed:
                return dropped
        import ray

        from forge_ray.trajectories import split

        table, stats = await asyncio.to_thread(self._samples.read, version)
        refs = [ray.put(part) for part in split.split(table, self._config.train.workers)]
        await self._exchange.put_step.remote(version, refs, stats)
        self.offered = version
        return False

    async def _form(self, version: int) -> tuple[bool, bool]:
        """Whether the batch is there now, and whether groups were dropped."""
        from forge_ray.trajectories import batch

        train, scheduler = self._config.train, self._flow.scheduler
        ready, silent = self._flow.sift(
            [group for group in scheduler.ready() if group.index in self._built], lambda group: self._silent.get(group.index, False)
        )
        self._release(silent)
        taken = self._flow.take(
            version,
            ready,
            lambda group: batch.group_staleness(self._built[group.index], version),
        )
        self._release(taken.stale)
        if taken.held and self._held_since is None:
            self._held_since = time.monotonic()
        if not taken.batch:
            return False, bool(taken.stale or silent)
        held_s = 0.0 if self._held_since is None else time.monotonic() - self._held_since
        self._held_since = None
        built = await asyncio.to_thread(batch.form, [self._built[g.index] for g in taken.batch], train, version=version)
        stats = {
            **built.stats,
            **reward_figures(record for group in taken.batch for record in group.records),
            "stale_groups": scheduler.stale_groups,
            "empty_groups": scheduler.empty_groups,
            "held_s": held_s,
            "resampled_groups": len(self._flow.resampled),
            "resampled": list(self._flow.resampled),
            "unused_rollouts": scheduler.unused,
            "treatments": {str(name): number for name, number in scheduler.treated.items()},
            "outcomes": dict(self._flow.outcomes),
            "taken": [group.index for group in taken.batch],  # a group without a token to train has no row in the table
        }
        if self._rater is not None:
            rows = [rating for group in taken.batch for rating in self._rated[group.index]]
            await asyncio.to_thread(store_ratings, self._location, version, self._rater, rows)
        await asyncio.to_thread(self._samples.write, version, built.table, stats)
        self._flow.used(taken.batch)
        self._release(taken.batch)
        return True, bool(taken.stale or silent)

    def _release(self, groups: list[Group]) -> None:
        """Let go of the recordings of groups that are used or dropped."""
        for group in groups:
            del self._built[group.index]
            self._silent.pop(group.index, None)
            self._rated.pop(group.index, None)
            self._recordings.done([*group.accepted.values(), *group.dropped.values()])
