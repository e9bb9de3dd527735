"""`forge-ray train --from-rollouts`: the train loop on stored rollouts. No harness, no proxy, no engine.

    stored groups → step batch → train worker → weights, checkpoints, metrics

The trainer is the one of every run; only where its batches come from differs (`stored_source`, `stored_groups`, `stored_batches`).

Stored tokens were sampled by another run's weights. Their recorded log-probabilities are the old policy of the loss, as always, and what
is too far from the policy is the loss's to mask (`train.loss.stale.kl`, `train.loss.importance`). Version numbers of the other run mean
nothing here: `steps` of every token is `UNKNOWN`, so that the guard that compares engine and trainer (`train_loop/agreement.py`) has
nothing to compare, and staleness is not measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import stored_groups
from forge_ray.job.rating import Rater, rater_of
from forge_ray.job.runtime import Runtime
from forge_ray.job.sources import demonstrations
from forge_ray.job.step_report import StepReport
from forge_ray.job.stored_batches import StoredBatches
from forge_ray.job.stored_groups import Plan
from forge_ray.job.stored_source import StoredSource
from forge_ray.job.trainer_events import TrainerEvents
from forge_ray.model_files import tokenizer_sha256
from forge_ray.run_dir import RunDir
from forge_ray.train_loop.trainer import TrainerThread, start_exchange
from forge_ray.trajectories.store import rescores

if TYPE_CHECKING:
    from forge_ray.report.metrics import MetricsWriter
    from forge_ray.report.phases import PhaseLog
    from forge_ray.report.progress import Progress

FAR = 1.0
"""Mean distance of two policies, in nats per token, that no few updates make."""


def prepare(config: Config, sources: Sequence[StoredSource]) -> tuple[Config, Plan]:
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


def check_tokenizer(model: Path, sources: Sequence[StoredSource]) -> None:
    """Raise `UserError` where a store's tokens are those of another tokenizer than the model's."""
    own = tokenizer_sha256(model)
    for source in sources:
        theirs = {value for value in source.reader.table("rollouts", ["tokenizer_sha256"])["tokenizer_sha256"].to_pylist() if value}
        if own is not None and theirs - {own}:
            raise UserError(
                f"the rollouts of {source.name} hold tokens of another tokenizer than the model's", where="policy.model",
                fix="train the model that they were sampled with, or one with its tokenizer",
            )  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """What an offline run begins with."""

    model: Path
    teacher: Path | None
    rater: Rater | None
    plan: Plan


async def inputs(config: Config, run: RunDir, runtime: Runtime, sources: Sequence[StoredSource], progress: Progress) -> Inputs:
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
    config: Config, run: RunDir, given: Inputs, sources: Sequence[StoredSource],
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
