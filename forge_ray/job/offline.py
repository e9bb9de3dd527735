"""`forge-ray train --from-rollouts`: the train loop on stored rollouts. No harness, no proxy, no engine.

    stored groups → step batch → train worker → weights, checkpoints, metrics

The trainer is the one of every run; only where its batches come from differs. As there, the batch of step k is formed once, lies on disk
before it is offered, and is trained again as it is by a run that goes on.

Stored tokens were sampled by another run's weights. Their recorded log-probabilities are the old policy of the loss, as always, and what
is too far from the policy is the loss's to mask (`train.loss.stale.kl`, `train.loss.importance`). Version numbers of the other run mean
nothing here: `steps` of every token is `UNKNOWN`, so that the guard that compares engine and trainer (`train_loop/agreement.py`) has
nothing to compare, and staleness is not measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import store, stored_groups
from forge_ray.job.rating import Rater, rater_of, store_ratings
from forge_ray.job.runtime import RunFailed, Runtime
from forge_ray.job.sources import demonstrations
from forge_ray.job.step_report import StepReport
from forge_ray.job.stored_groups import Plan, Stored
from forge_ray.job.trainer_events import TrainerEvents
from forge_ray.model_files import tokenizer_sha256
from forge_ray.run_dir import RunDir
from forge_ray.train_loop.trainer import TrainerThread, start_exchange
from forge_ray.trajectories import batch, split
from forge_ray.trajectories.store import ratings, rescores
from forge_ray.trajectories.store.reader import StoreReader

if TYPE_CHECKING:
    from forge_ray.report.metrics import MetricsWriter
    from forge_ray.report.phases import PhaseLog
    from forge_ray.report.progress import Progress
    from forge_ray.rollout import RolloutRecord
    from forge_ray.trajectories.call import Call
    from forge_ray.trajectories.ratings import Rating

FAR = 1.0
"""Mean distance of two policies, in nats per token, that no few updates make."""
UNKNOWN = -1
"""Step number of weights that this run never had."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One store that rollouts come from."""

    name: str
    """Of its run."""
    reader: StoreReader

    def records(self, rewards: str) -> list[RolloutRecord]:
        """Its training rollouts with the rewards that `train.offline.rewards` means. Raises `UserError`."""
        records = self.reader.rollouts("train")
        if rewards == rescores.RECORDED:
            return records
        found = rescores.rows(self.reader.table("rescores"))
        if rewards != rescores.LATEST and all(row.rescore != rewards for row in found):
            return records  # made in another of the sources; `prepare` sees that one has it
        return rescores.apply(records, rescores.choose(found, rewards))

    def rescored(self) -> set[str]:
        """Names of its rescores."""
        return set(self.reader.table("rescores", ["rescore"])["rescore"].to_pylist())


def prepare(config: Config, sources: Sequence[Source]) -> tuple[Config, Plan]:
    """The plan of a new offline run, and its config with the number of steps that come of it. Raises `UserError`."""
    offline = config.train.offline
    assert offline is not None
    if config.train.loss.stale.versions is not None:
        raise UserError(
            "the weights that sampled stored rollouts are another run's and have no age here",
            where="train.loss.stale.versions",
            fix="mask by train.loss.stale.kl instead",
        )
    known = set().union(*(source.rescored() for source in sources))
    if offline.rewards not in (rescores.RECORDED, rescores.LATEST, *known):
        some = ", ".join(["recorded", "latest", *sorted(known)[-5:]])
        raise UserError(f"there is no rescore {offline.rewards!r}", where="--rewards", fix=f"give one of {some}")
    found = stored_groups.plan(config, [(source.name, source.records(offline.rewards)) for source in sources])
    train = config.train.model_copy(update={"steps": stored_groups.steps(found, config)})
    return config.model_copy(update={"train": train}), found


def check_tokenizer(model: Path, sources: Sequence[Source]) -> None:
    """Raise `UserError` where a store's tokens are those of another tokenizer than the model's."""
    own = tokenizer_sha256(model)
    for source in sources:
        theirs = {value for value in source.reader.table("rollouts", ["tokenizer_sha256"])["tokenizer_sha256"].to_pylist() if value}
        if own is not None and theirs - {own}:
            raise UserError(
                f"the rollouts of {source.name} hold tokens of another tokenizer than the model's", where="policy.model",
                fix="train the model that they were sampled with, or one with its tokenizer",
            )  # fmt: skip


class StoredBatches:
    """The step batches of an offline run."""

    def __init__(
        self, config: Config, run: RunDir, plan: Plan, sources: Sequence[Source], exchange: Any, rater: Rater | None = None
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
        from forge_ray.report.statistics import mean_ci

        train = self._config.train
        groups = [self._group(index) for index in self._order[step]]
        built = batch.build_step(groups, train)
        rewards = [reward for group in groups for record, _ in group if (reward := batch.reward_of(record)) is not None]
        stats = {
            **built.stats,
            "reward_ci": mean_ci(rewards)[1],
            "pass_rate": sum(reward >= 1 for reward in rewards) / len(rewards) if rewards else None,
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


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What an offline run begins with."""

    model: Path
    teacher: Path | None
    rater: Rater | None
    plan: Plan


async def inputs(config: Config, run: RunDir, runtime: Runtime, sources: Sequence[Source], progress: Progress) -> Inputs:
    """Model, teacher and plan, checked against one another. Raises `UserError`."""
    progress.phase("inputs", "model and stored rollouts")
    model = await runtime.learner_model()
    teacher, rater = await runtime.teacher(model), rater_of(config, model)
    await asyncio.to_thread(check_tokenizer, model, sources)
    plan = stored_groups.kept(run)
    progress.done("inputs", f"{plan.rollouts} rollouts in {len(plan.groups)} groups, of {', '.join(plan.sources)}")
    for reason, number in plan.left_out.items():
        progress.note(f"left out: {number} {reason}")
    if config.eval.before or config.eval.after or config.eval.every:
        progress.note("nothing is served, so nothing is evaluated: use forge-ray eval --checkpoint afterwards")
    return Inputs(model, teacher, rater, plan)


async def learn(
    config: Config, run: RunDir, given: Inputs, sources: Sequence[Source],
    phases: PhaseLog, progress: Progress, metrics: MetricsWriter, *, resume: bool,
) -> None:  # fmt: skip
    """Train until `train.steps`."""
    made: Path | None = None
    if config.train.sft is not None and not any(run.checkpoints.glob("step-*")):
        with phases.phase("demonstrations"):
            made = await demonstrations(config.train.sft, run, config.seed)
    exchange = start_exchange(run)
    batches = StoredBatches(config, run, given.plan, sources, exchange, given.rater)
    report = StepReport(run, config.train.optimizer.epochs, batches, metrics, progress)
    trainer = TrainerThread(config, run, given.model, made, exchange, given.teacher)
    try:
        with phases.phase("train"):
            steps = _Steps(config, batches, report, exchange, progress, resume)
            await TrainerEvents(run, config.train, exchange, trainer, progress, weights=steps.weights).follow()
    finally:
        if given.rater is not None:
            await given.rater.close()


class _Steps:
    """Answers new weights with the next batch."""

    def __init__(self, config: Config, batches: StoredBatches, report: StepReport, exchange: Any, progress: Progress, resume: bool) -> None:
        self._steps, self._batches, self._report = config.train.steps, batches, report
        self._exchange, self._progress, self._resume = exchange, progress, resume
        self._begun = time.time()
        self._restarts = -1

    async def weights(self, event: dict[str, Any]) -> None:
        """The trainer holds the weights after so many steps."""
        step, trained = event["step"], event["metrics"]
        if trained is not None:
            now = time.time()
            self._report.step(event, trained, {"seconds": now - self._begun, "trainer_restarts": self._restarts})
            self._begun = now
            if step == 1 and (away := trained.get("logprob_difference") or 0) > FAR:
                self._progress.warn(
                    f"the model is {away:.1f} nats per token away from the policy that sampled the stored rollouts; to train that one, set "
                    "policy.model to its checkpoint and train.sft to null"
                )
        else:
            self._restarts += 1
            self._started(step, event["restored"])
        if step < self._steps:
            await self._batches.offer(step)
        else:
            await self._exchange.close.remote()

    def _started(self, step: int, restored: dict[str, Any] | None) -> None:
        """The workers came up, from a checkpoint if `restored`."""
        if self._restarts:
            self._progress.warn(f"the trainer's workers were started again ({self._restarts}), and go on from step {step}")
        elif restored is not None:
            self._report.restored(step, restored)
            if self._resume and self._batches.stored > step:
                self._progress.note(f"going on at step {step}, with {self._batches.stored - step} batches that are stored already")
