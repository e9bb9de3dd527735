"""The driver: one asyncio loop that ties a run together.

    admission → RolloutPool → finished groups → step batch → train worker → weights → every replica → admission …

The driver decides when; it never looks into a token. Invariants:

- the batch of step k is formed once, when the version is k, from groups whose oldest trained token is at most `max_staleness`
  versions old; it lies on disk before it is offered, so a run that starts again trains the same batch;
- one batch is out at a time; rollouts go on meanwhile, within the admission capacity;
- the version that admission and staleness count with moves only after every replica serves the weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forge_ray.config import Config
from forge_ray.job import library
from forge_ray.job.compaction import Compaction
from forge_ray.job.dispatch import Dispatch
from forge_ray.job.evaluate import evaluate
from forge_ray.job.runtime import RunFailed
from forge_ray.job.scheduler import Group, Scheduler, TaskRef
from forge_ray.outcome import RATED
from forge_ray.report import signal
from forge_ray.report.metrics import StepMetrics, read_metrics
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir
from forge_ray.serve_proxy.client import ProxyUnavailable
from forge_ray.trajectories import continuity

if TYPE_CHECKING:
    from forge_ray.report.metrics import MetricsWriter
    from forge_ray.report.progress import Progress
    from forge_ray.serve_proxy.client import ProxyClient
    from forge_ray.train_loop.trainer import TrainerThread

log = logging.getLogger(__name__)


class Driver:
    """A run between "everything is up" and "the last step is trained"."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        tasks: list[TaskRef],
        heldout: list[TaskRef],
        *,
        client: ProxyClient,
        dispatch: Dispatch,
        exchange: Any,
        trainer: TrainerThread,
        metrics: MetricsWriter,
        progress: Progress,
    ) -> None:
        self.config, self.run = config, run
        self._heldout = heldout
        self._client, self._dispatch, self._exchange, self._trainer = client, dispatch, exchange, trainer
        self._metrics, self._progress = metrics, progress
        self._recordings = library.Recordings(run, train_grammar_calls=config.proxy.train_grammar_calls)
        self._compaction = Compaction(run.calls, config.proxy.log_segment_mb * 2**20)
        self._scheduler = Scheduler(config, tasks)
        self._built: dict[int, list[Any]] = {}
        """Group index → its records with their calls, once complete."""
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._offered: int | None = None
        """Step whose batch the trainer has."""
        self._evaluated: set[int] = set()
        self._fruitless = 0
        """Records in a row that carry no reward."""
        self._in_flight = 0
        self._step_started = time.time()
        self._outcomes: dict[str, int] = {}
        self._sampled_before = 0
        self._synced = -1
        """Highest step whose weights the replicas were brought to."""
        self.version: int | None = None
        """Step number of the weights that every replica serves; None before the first sync."""

    # ---- coming up ----

    async def first_weights(self) -> None:
        """Wait for the trainer's first weights (after SFT, or of the checkpoint) and bring them into the replicas."""
        self._follower = self._spawn(self._follow_trainer())
        while self.version is None:
            await self._wait()

    def restore(self) -> None:
        """Take up the stored rollouts and batches of a stopped run."""
        from forge_ray.trajectories import schema

        trained: set[int] = set()
        for file in self.run.batches.glob("step-*.parquet"):
            trained.update(schema.read_stats(file)["taken"])
        self._scheduler.restore((r for r in library.records(self.run) if r.purpose == "train"), trained)

    # ---- learning ----

    async def learn(self) -> None:
        """Train until `train.steps`, evaluating in between where the config says so."""
        assert self.version is not None
        for group in self._scheduler.ready():
            await self._build(group)
        self._step_started = time.time()
        while self.version < self.config.train.steps:
            every = self.config.eval.every
            if every and self.version and self.version % every == 0 and self.version not in self._evaluated:
                self._evaluated.add(self.version)
                await self.evaluate(f"step-{self.version}")
            self._admit()
            await self._offer_batch()
            self._refuse_to_wait_for_nothing()
            await self._wait()
        await self._exchange.close.remote()
        await self._trainer.wait()

    async def evaluate(self, label: str) -> list[RolloutRecord]:
        """Held-out evaluation with the weights that are being served."""
        records: list[RolloutRecord] = []
        total = len(self._heldout) * self.config.eval.samples * len(self.config.harnesses)
        done = [r for r in library.records(self.run) if r.purpose == "eval" and r.key.startswith(f"eval-{label}-")]
        async for record in evaluate(self.config, self._dispatch, self._heldout, label, done=done):
            records.append(record)
            self._recordings.done([record])
            self._check()
            self._watch(record)
            self._progress.evaluation(label, records, total)
        return records

    def _admit(self) -> None:
        """Admit whole groups while the staleness bound has room, launch what is queued while slots are free."""
        from forge_ray.train_loop.admission import groups_to_start

        train, scheduler = self.config.train, self._scheduler
        assert self.version is not None
        first = self.version
        while library.batch_path(self.run, first).exists():
            first += 1
        if first - self.version > train.max_staleness:
            # Steps that a checkpoint does not hold are trained again: what began now would be too old for the first new batch, and would
            # spoil the finished rollouts of its group with it.
            return
        limit = self.config.rollouts.max_in_flight
        while True:
            for request in scheduler.launchable(limit - self._in_flight):
                self._in_flight += 1
                self._spawn(self._rollout(request))
            # Slots of an admitted group may wait for a free place: `max_in_flight` bounds what is launched, the staleness what is admitted.
            room = groups_to_start(
                max_in_flight=scheduler.running + train.group_size,
                running=scheduler.running,
                accepted=scheduler.accepted,
                version=self.version,
                max_staleness=train.max_staleness,
                groups_per_step=train.groups_per_step,
                group_size=train.group_size,
            )
            if self._in_flight >= limit or not room or scheduler.claimed >= train.steps * train.groups_per_step:
                return
            scheduler.admit_group()

    def _refuse_to_wait_for_nothing(self) -> None:
        """Stop a run that nothing would ever wake up: no batch is out, nothing runs or is queued, and nothing more may be admitted."""
        if self._offered == self.version or self._wake.is_set() or self._tasks - {self._follower} or self._scheduler.waiting:
            return
        ready, scheduler, train = len(self._scheduler.ready()), self._scheduler, self.config.train
        raise RunFailed(
            f"step {self.version} cannot be filled: {ready} of its {train.groups_per_step} groups are ready, nothing runs, and no group "
            f"may be admitted ({scheduler.claimed} are, {scheduler.accepted} rollouts ended): the stored rollouts do not fit the config"
        )

    async def _rollout(self, request: Any) -> None:
        try:
            record = await self._dispatch.run(request)
        finally:
            self._in_flight -= 1
        self._outcomes[record.outcome] = self._outcomes.get(record.outcome, 0) + 1
        self._watch(record)
        before = {group.index for group in self._scheduler.ready()}
        self._scheduler.finish(record)
        for group in self._scheduler.ready():
            if group.index not in before:
                await self._build(group)
        self._progress.rollouts(self._in_flight, self._scheduler.accepted, self._outcomes)
        self._wake.set()

    def _watch(self, record: RolloutRecord) -> None:
        """Stop a run in which nothing works: every treatment of a failure would go on for ever."""
        self._fruitless = 0 if record.outcome in RATED else self._fruitless + 1
        # A lost replica may take everything in flight with it once, and that is no reason to stop.
        at_once = max(self.config.rollouts.max_in_flight, self.config.eval.max_in_flight or 0)
        if self._fruitless >= max(24, 3 * self.config.train.group_size, 2 * at_once + 1):
            raise RunFailed(
                f"the last {self._fruitless} rollouts all failed; the last one: {record.outcome}: {record.detail}; "
                f"see {self.run.rollouts / record.id}"
            )

    async def _build(self, group: Group) -> None:
        self._built[group.index] = await asyncio.to_thread(self._recordings.with_calls, group.records)

    async def _offer_batch(self) -> None:
        """Give the trainer the batch of the current version, if it does not have it and there are enough groups."""
        version = self.version
        assert version is not None
        if self._offered == version:
            return
        path = library.batch_path(self.run, version)
        if not path.exists() and not await self._form_batch(version):
            return
        import ray

        from forge_ray.trajectories import batch, schema

        table, stats = await asyncio.to_thread(schema.read_batch, path)
        refs = [ray.put(part) for part in batch.split(table, self.config.train.workers)]
        await self._exchange.put_step.remote(version, refs, stats)
        self._offered = version

    async def _form_batch(self, version: int) -> bool:
        from forge_ray.report.statistics import mean_ci
        from forge_ray.train_loop import admission
        from forge_ray.trajectories import batch, schema

        train = self.config.train
        ready = [group for group in self._scheduler.ready() if group.index in self._built]
        taken = admission.take(
            ready,
            staleness=lambda group: batch.group_staleness(self._built[group.index], version, train),
            max_staleness=train.max_staleness,
            size=train.groups_per_step,
        )
        self._scheduler.drop_stale(taken.stale)
        self._release(taken.stale)
        if taken.stale:
            self._wake.set()  # their places are free: with nothing in flight nobody else would say so
        if not taken.batch:
            return False
        built = await asyncio.to_thread(batch.build_step, [self._built[g.index] for g in taken.batch], train, version=version)
        rewards = [reward for group in taken.batch for record in group.records if (reward := batch.reward_of(record)) is not None]
        stats = {
            **built.stats,
            "reward_ci": mean_ci(rewards)[1],
            "pass_rate": sum(reward >= 1 for reward in rewards) / len(rewards) if rewards else None,
            "stale_groups": self._scheduler.stale_groups,
            "empty_groups": self._scheduler.empty_groups,
            "outcomes": dict(self._outcomes),
            "taken": [group.index for group in taken.batch],  # a group without a token to train has no row in the table
        }
        await asyncio.to_thread(schema.write_batch, library.batch_path(self.run, version), built.table, stats)
        self._scheduler.take(taken.batch)
        self._release(taken.batch)
        self._outcomes = {}
        return True

    def _release(self, groups: list[Group]) -> None:
        """Let go of the recordings of groups that are used or dropped."""
        for group in groups:
            del self._built[group.index]
            self._recordings.done([*group.accepted.values(), *group.dropped.values()])

    # ---- the trainer's side ----

    async def _follow_trainer(self) -> None:
        """Handle the trainer's events in order: all that it posts while it lives, and what is left when it has ended."""
        number, ended = 0, False
        while True:
            events = await self._exchange.events.remote(number, 0.1 if ended else 1.0)
            for event in events:
                number += 1
                await self._handle(event)
            if ended and not events:
                break
            ended = self._trainer.done()
        self._trainer.check()

    async def _handle(self, event: dict[str, Any]) -> None:
        if event["kind"] == "progress":
            self._progress.phase(event["phase"], event["detail"])
        elif event["kind"] == "note":
            log.warning("trainer: %s", event["text"])
            self._progress.note(event["text"])
        elif event["kind"] == "checkpoint":
            await self._exchange.forget_before.remote(event["step"])
        elif event["kind"] == "weights":
            await self._new_weights(event)
        elif event["kind"] == "failed":
            raise RunFailed(event["error"])
        else:
            raise RunFailed(f"unknown trainer event {event['kind']!r}")

    async def _new_weights(self, event: dict[str, Any]) -> None:
        from forge_ray.train_loop.weight_sync import sync

        started = time.time()
        if event["step"] >= self._synced:
            await sync(self._client, event["path"], event["version"])
            self._synced = event["step"]
        # Else a restarted worker group catches up with what is served: the replicas are not dragged back.
        sync_s = time.time() - started
        trained = event.get("metrics")
        if self.version is not None and trained is None:
            # The worker group was restarted and went back to a checkpoint: its batches are offered again as they are.
            log.warning("the trainer restarted at step %s", event["step"])
        self.version, self._offered = event["step"], None
        if trained is not None:
            await self._report_step(event, trained, sync_s)
        elif event["restored"] is not None:
            self._report_restored(event["step"], event["restored"])
        self._wake.set()

    async def _report_step(self, event: dict[str, Any], trained: dict[str, Any], sync_s: float) -> None:
        now = time.time()
        seconds = now - self._step_started
        tokens_per_s = None
        try:
            replicas = await self._client.status(timeout_s=10)
            self._compaction.kick([status["replica"] for status in replicas])
            sampled = sum(status["sampled_tokens"] for status in replicas)
            tokens_per_s = max(sampled - self._sampled_before, 0) / seconds
            self._sampled_before = sampled
        except ProxyUnavailable as error:
            log.warning("no token count for step %s: %s", event["step"], error)
        row = self._row(event["step"], event["version"], event["stats"], trained)
        self._step_started = now
        if warned := continuity.warning(event["stats"]):
            self._progress.warn(f"step {event['step']}: {warned}")
        self._report(row.model_copy(update={"seconds": seconds, "rollout_tokens_per_s": tokens_per_s, "sync_s": sync_s}))

    def _report_restored(self, step: int, checkpoint: dict[str, Any]) -> None:
        """The step of the checkpoint that a stopped run goes on from, if its driver died before it had written it down."""
        from forge_ray.trajectories import schema

        if all(row.step != step for row in read_metrics(self.run.metrics)):
            stats = schema.read_stats(library.batch_path(self.run, step - 1))
            self._report(self._row(step, f"{checkpoint['incarnation']}.{step}", stats, checkpoint["metrics"]))

    def _report(self, row: StepMetrics) -> None:
        self._metrics.append(row)
        self._progress.step(row)
        if warned := signal.warning(row):
            self._progress.warn(f"step {row.step}: {warned}")

    def _row(self, step: int, version: str, stats: dict[str, Any], trained: dict[str, Any]) -> StepMetrics:
        tokens = int(stats["tokens_trained"])
        return StepMetrics(
            step=step,
            version=version,
            reward_mean=stats.get("reward_mean"),
            reward_ci=stats["reward_ci"],
            pass_rate=stats["pass_rate"],
            outcomes=stats["outcomes"],
            groups=int(stats["groups"]),
            degenerate_groups=int(stats["groups_degenerate"]),
            staleness_mean=stats["staleness_mean"],
            staleness_max=int(stats["staleness_max"]),
            tokens=tokens,
            train_tokens_per_s=tokens * self.config.train.optimizer.epochs / max(trained["train_s"], 1e-6),
            samples_per_rollout=stats.get("samples_per_rollout"),
            **trained,
            **{name: stats.get(name) for name in ("calls_exact", "calls_spliced", "calls_forked", "fork_reason")},
            **{name: stats[name] for name in ("stale_groups", "empty_groups", "rollouts_untrained")},
        )

    # ---- tasks and failures ----

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._wake.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        self._check()

    async def stop(self) -> None:
        """Cancel what the driver itself runs."""
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with suppress(BaseException):
                await task
