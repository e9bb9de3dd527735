"""The step batches of an offline run: out of the stored groups, onto disk, to the trainer.

As in every run (`step_batches`), the batch of step k is formed once, lies on disk before it is offered, and is trained again as it is by a
run that goes on. The version of each token is `UNKNOWN`: the numbers of another run mean nothing here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from forge_ray.config import Config
from forge_ray.job import store, stored_groups
from forge_ray.job.rating import Rater, store_ratings
from forge_ray.job.runtime import RunFailed
from forge_ray.job.step_report import reward_figures
from forge_ray.job.stored_groups import Plan, Stored
from forge_ray.job.stored_source import StoredSource
from forge_ray.run_dir import RunDir
from forge_ray.trajectories import batch, split
from forge_ray.trajectories.store import ratings

if TYPE_CHECKING:
    from forge_ray.rollout import RolloutRecord
    from forge_ray.trajectories.call import Call
    from forge_ray.trajectories.ratings import Rating

UNKNOWN = -1
"""Step number of weights that this run never had."""


class StoredBatches:
    """The step batches of an offline run."""

    def __init__(
        self, config: Config, run: RunDir, plan: Plan, sources: Sequence[StoredSource], exchange: Any, rater: Rater | None = None
    ) -> None:
        self._config, self._plan, self._sources, self._exchange = config, plan, sources, exchange
        self._samples, self._location, self._rater = store.samples(config, run), store.location(config, run), rater
        train = config.train
        self._order = list(islice(stored_groups.batches(len(plan.groups), train.groups_per_step, config.seed), train.steps))

    def stats(self, step: int) -> dict[str, Any]:
        """What is known of the stored batch of `step`."""
        return self._samples.stats(step)

    @property
    def stored(self) -> int:
        """Batches on disk."""
        return len(self._samples.steps)

    async def offer(self, step: int) -> None:
        """Give the trainer the batch of `step`."""
        import ray

        if step not in self._samples.steps:
            await self.rate(step)
            await asyncio.to_thread(self.form, step)
        table, stats = await asyncio.to_thread(self._samples.read, step)
        refs = [ray.put(part) for part in split.split(table, self._config.train.workers)]
        await self._exchange.put_step.remote(step, refs, stats)

    def form(self, step: int) -> None:
        """Build the batch of `step` and put it on disk. Raises `RunFailed` where a rollout is not in its store any more."""
        train = self._config.train
        groups = [self._group(index) for index in self._order[step]]
        built = batch.build_step(groups, train)
        stats = {
            **built.stats,
            **reward_figures(record for group in groups for record, _ in group),
            "epoch": step * train.groups_per_step // len(self._plan.groups),
            "taken": self._order[step],
            "outcomes": {},
            # Of what a run that makes rollouts has here, there is nothing.
            "staleness_max": 0, "staleness_mean": None, "stale_groups": 0, "empty_groups": 0,
        }  # fmt: skip
        self._samples.write(step, without_versions(built.table), stats)

    async def rate(self, step: int) -> None:
        """Store what a served teacher says of the batch of `step`: as it is recorded, or asked for now. Nothing without one."""
        if (rater := self._rater) is None:
            return
        rows = []
        for index in self._order[step]:
            known = await asyncio.to_thread(self._known, index, rater)
            rows += await rater.rate(await asyncio.to_thread(self._group, index), known)
        await asyncio.to_thread(store_ratings, self._location, step, rater, rows)

    def _known(self, group: int, rater: Rater) -> dict[tuple[str, str], Rating]:
        found = {}
        for number, source in enumerate(self._sources):
            names = {stored.id: stored.record.id for stored in self._plan.groups[group] if stored.source == number}
            for (rollout, call), rating in ratings.known(source.reader, rater.name, rater.model, names).items():
                found[names[rollout], call] = dataclasses.replace(rating, rollout=names[rollout])
        return found

    def _group(self, index: int) -> list[tuple[RolloutRecord, list[Call]]]:
        return [(stored.record, self._calls(stored)) for stored in self._plan.groups[index]]

    def _calls(self, stored: Stored) -> list[Call]:
        source = self._sources[stored.source]
        calls = source.reader.calls(stored.id)
        if not calls and stored.record.calls:
            raise RunFailed(f"the calls of rollout {stored.id} are not in the store of {source.name} any more")
        lift = self._config.proxy.train_grammar_calls
        return [
            dataclasses.replace(call, session=stored.record.id, masked_by_grammar=call.masked_by_grammar and not lift) for call in calls
        ]


def without_versions(table: pa.Table) -> pa.Table:
    """`table` (of samples or of tries) with `UNKNOWN` in the place of the version of each token."""
    column = table["steps"].combine_chunks()
    field, values = table.schema.field("steps"), pa.array(np.full(len(column.values), UNKNOWN, np.int32))
    return table.set_column(table.column_names.index("steps"), field, pa.ListArray.from_arrays(column.offsets, values, type=field.type))
