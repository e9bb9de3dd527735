"""The driver: one asyncio loop that ties a run together.

    admission → RolloutPool → finished groups → step batch → train worker → weights → every replica → admission …

The driver decides when; it never looks into a token. Invariants:

- what may start and what a step trains is `flow`'s to say, batches are `step_batches`', lines of metrics `step_report`'s;
- rollouts go on while a batch is trained, within the admission capacity;
- the version that admission and staleness count with moves only after every replica serves the weights.

Where the trainer is slower than the rollouts, the admission capacity runs out and places stay empty (`slot_idle_share`); where the rollouts
are slower, the trainer waits for its batch (`trainer_idle_share`). Neither loses anything, and neither needs a setting.
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
from forge_ray.job.flow import Flow
from forge_ray.job.occupancy import Occupancy
from forge_ray.job.rating import Rater
from forge_ray.job.runtime import RunFailed
from forge_ray.job.scheduler import TaskRef
from forge_ray.job.step_batches import StepBatches
from forge_ray.job.step_report import StepReport
from forge_ray.job.trainer_events import TrainerEvents
from forge_ray.outcome import RATED, Treatment, treatment
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir
from forge_ray.serve_proxy.client import ProxyUnavailable

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
        rater: Rater | None = None,
    ) -> None:
        self.config, self.run = config, run
        self._heldout = heldout
        self._client, self._dispatch, self._exchange, self._trainer = client, dispatch, exchange, trainer
        self._progress = progress
        self._flow = Flow(config, tasks)
        self._rater = rater
        self._batches = StepBatches(config, run, self._flow, exchange, rater)
        self._report = StepReport(run, config.train.optimizer.epochs, self._batches, metrics, progress)
        self._events = TrainerEvents(run, config.train, exchange, trainer, progress, weights=self._new_weights)
        self._compaction = Compaction(run.calls, config.proxy.log_segment_mb * 2**20)
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._evaluated: set[int] = set()
        self._restarts = 0
        """Of the train workers, after one of them was lost."""
        self._fruitless = 0
        """Records in a row that carry no reward."""
        self._step_started = time.time()
        self._slots = Occupancy(config.rollouts.max_in_flight, time.monotonic())
        self._sampled_before = 0
        self._synced = -1
        """Highest step whose weights the replicas were brought to."""
        self.version: int | None = None
        """Step number of the weights that every replica serves; None before the first sync."""

    # ---- coming up ----

    async def first_weights(self) -> None:
        """Wait for the trainer's first weights (after SFT, or of the checkpoint) and bring them into the replicas."""
        self._follower = self._spawn(self._events.follow())
        while self.version is None:
            await self._wait()

    def restore(self) -> None:
        """Take up the stored rollouts and batches of a stopped run."""
        self._flow.restore((r for r in library.records(self.run) if r.purpose == "train"), self._batches.every_stats())

    @property
    def fresh(self) -> bool:
        """Whether no batch was ever formed."""
        return not self._batches.replays(0)

    @property
    def replays(self) -> int:
        """Stored batches that are trained again from here on."""
        return self._batches.replays(self.version or 0)

    # ---- learning ----

    async def learn(self) -> None:
        """Train until `train.steps`, evaluating in between where the config says so."""
        assert self.version is not None
        for group in self._flow.scheduler.ready():
            await self._batches.build(group)
        for group in self._flow.scheduler.open_groups():
            await self._batches.date(group, self.version)
        self._step_started = time.time()
        self._slots.idle_share(time.monotonic())
        while self.version < self.config.train.steps:
            every = self.config.eval.every
            if every and self.version and self.version % every == 0 and self.version not in self._evaluated:
                self._evaluated.add(self.version)
                await self.evaluate(f"step-{self.version}")
            self._launch()
            if await self._batches.offer(self.version):
                self._wake.set()  # the places of what was dropped are free: with nothing in flight nobody else would say so
            self._refuse_to_wait_for_nothing()
            await self._wait()
        await self._exchange.close.remote()
        await self._trainer.wait()

    async def evaluate(self, label: str) -> None:
        """Held-out evaluation with the weights that are being served."""
        assert self.version is not None
        records: list[RolloutRecord] = []
        total = len(self._heldout) * self.config.eval.samples * len(self.config.harnesses)
        since = self._report.outdated(label, self.version)
        stored = (r for r in library.records(self.run) if r.purpose == "eval" and r.key.startswith(f"eval-{label}-"))
        done = [record for record in stored if record.started >= since]
        async for record in evaluate(self.config, self._dispatch, self._heldout, label, done=done):
            records.append(record)
            self._batches.forget([record])
            self._check()
            self._watch(record)
            self._progress.evaluation(label, records, total)
        self._report.evaluation(label, self.version, records)

    def _launch(self) -> None:
        assert self.version is not None
        for request in self._flow.launch(self.version, replays=self._batches.replays(self.version)):
            self._spawn(self._rollout(request))
        self._slots.set(self._flow.in_flight, time.monotonic())

    def _refuse_to_wait_for_nothing(self) -> None:
        """Stop a run that nothing would ever wake up: no batch is out, nothing runs or is queued, and nothing more may be admitted."""
        scheduler, train = self._flow.scheduler, self.config.train
        if self._batches.offered == self.version or self._wake.is_set() or self._tasks - {self._follower} or scheduler.waiting:
            return
        ready = len(scheduler.ready())
        raise RunFailed(
            f"step {self.version} cannot be filled: {ready} of its {train.groups_per_step} groups are ready, nothing runs, and no group "
            f"may be admitted ({scheduler.claimed} are, {scheduler.accepted} rollouts ended): the stored rollouts do not fit the config"
        )

    async def _rollout(self, request: Any) -> None:
        try:
            record = await self._dispatch.run(request)
        except BaseException:
            self._flow.lost()
            raise
        self._watch(record)
        for group in self._flow.finish(record):
            await self._batches.build(group)
        self._slots.set(self._flow.in_flight, time.monotonic())
        self._progress.rollouts(self._flow.in_flight, self._flow.scheduler.accepted, self._flow.outcomes)
        self._wake.set()

    def _watch(self, record: RolloutRecord) -> None:
        """Stop a run in which nothing works: every treatment of a failure would go on for ever."""
        rollouts = self.config.rollouts
        # One that is rated and dropped all the same helps nobody either: a preset that drops what is truncated, and each is.
        fit = record.purpose == "eval" or treatment(record.outcome, rollouts.preset, rollouts.on_outcome) is Treatment.TRAIN
        self._fruitless = 0 if record.outcome in RATED and fit else self._fruitless + 1
        # A lost replica may take everything in flight with it once, and that is no reason to stop.
        at_once = max(self.config.rollouts.max_in_flight, self.config.eval.max_in_flight or 0)
        if self._fruitless >= max(24, 3 * self.config.train.group_size, 2 * at_once + 1):
            raise RunFailed(
                f"none of the last {self._fruitless} rollouts can be used; the last one: {record.outcome}: {record.detail}; "
                f"see {self.run.rollouts / record.id}"
            )

    # ---- the trainer's side ----

    async def _new_weights(self, event: dict[str, Any]) -> None:
        from forge_ray.train_loop.weight_sync import sync

        started = time.time()
        if event["step"] >= self._synced:
            node = event.get("node")
            told = await sync(self._client, self.run, event["path"], event["version"], self.config.train.sync, node=node)
            for replica in told["replaced"]:
                self._progress.warn(f"replica {replica} was too slow for the weights of step {event['step']} and was replaced")
            self._synced = event["step"]
        # Else a restarted worker group catches up with what is served: the replicas are not dragged back.
        sync_s = time.time() - started
        trained = event.get("metrics")
        if self.version is not None and trained is None:
            # The worker group was restarted and went back to a checkpoint: its batches are offered again as they are.
            self._restarts += 1
            log.warning("the trainer restarted at step %s", event["step"])
            self._progress.warn(f"the trainer's workers were started again ({self._restarts}), and go on from step {event['step']}")
        self.version, self._batches.offered = event["step"], None
        if trained is not None:
            await self._report_step(event, trained, sync_s)
        elif event["restored"] is not None:
            self._report.restored(event["step"], event["restored"])
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
        driven = {
            "seconds": seconds,
            "trainer_restarts": self._restarts,
            "rollout_tokens_per_s": tokens_per_s,
            "sync_s": sync_s,
            "trainer_idle_share": min(trained["wait_s"] / max(seconds, 1e-9), 1.0),
            "slot_idle_share": self._slots.idle_share(time.monotonic()),
        }
        self._step_started = now
        self._report.step(event, trained, driven)

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
        if self._rater is not None:
            await self._rater.close()
