"""`forge-ray train`: a whole run, from the config to the report.

What can go on side by side does: the engine starts on the initial model while demonstrations are made and SFT runs, and gets the trained
weights as its first update. Each stage is timed under its name in `phases.jsonl`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_ray.config import Config
from forge_ray.job import numbering, offline, stall, stored_groups
from forge_ray.job.driver import Driver
from forge_ray.job.rating import Rater, rater_of
from forge_ray.job.run_log import run_log
from forge_ray.job.runtime import Runtime
from forge_ray.job.scheduler import TaskRef
from forge_ray.job.sources import demonstrations as made_demonstrations
from forge_ray.job.stored_source import StoredSource
from forge_ray.report import sinks
from forge_ray.report.metrics import MetricsWriter
from forge_ray.report.phases import PhaseLog
from forge_ray.report.progress import Progress
from forge_ray.report.records import read_records
from forge_ray.report.summary import Summary, write_summary
from forge_ray.run_dir import RunDir, next_incarnation
from forge_ray.train_loop.trainer import TrainerThread, start_exchange


def train(config: Config, run: RunDir, *, resume: bool, sources: Sequence[StoredSource] = ()) -> Summary:
    """Run to the end; returns the summary. `sources`: the stores of `train.offline`.

    Raises `UserError` for bad input, other `ForgeRayError`s for a run that failed, `KeyboardInterrupt` when it was stopped by SIGINT or
    SIGTERM (after everything was taken down)."""
    try:
        with run_log(run):
            asyncio.run(_train(config, run, resume=resume, sources=sources))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    from forge_ray.report.html import write_report

    records = read_records(run)
    stored = stored_groups.kept(run) if config.train.offline is not None else None
    summary = write_summary(run, records, stored_groups.trained(stored, config, config.train.steps) if stored is not None else None)
    write_report(run, records)
    return summary


async def _train(config: Config, run: RunDir, *, resume: bool, sources: Sequence[StoredSource]) -> None:
    phases = PhaseLog(run.phases)
    asked = sinks.makers(config, run)
    with (
        Progress(config.train.steps, title=config.name) as progress,
        MetricsWriter(run.metrics, sinks.Sinks(asked, progress.warn)) as metrics,
    ):
        async with Runtime(config, run) as runtime:
            with phases.phase("inputs"):  # before Ray: most of what can be wrong with a run is seen here
                stored = await offline.inputs(config, run, runtime, sources, progress) if config.train.offline is not None else None
                inputs = await _inputs(config, run, runtime, progress) if stored is None else None
            progress.phase("Ray", "starting")
            with phases.phase("ray"):
                cluster = runtime.connect()
                runtime.require_resources(training=True)
            progress.done("Ray", f"{'own cluster' if cluster.owned else cluster.address}, run directory {run.root}")
            if stored is not None:
                async with stall.watch(progress):
                    await offline.learn(config, run, stored, sources, phases, progress, metrics, resume=resume)
                return
            assert inputs is not None
            if not cluster.haproxy:
                progress.note("Serve runs without HAProxy (slower): start Ray with the variables of cluster/ray.env")
            async with stall.watch(progress):
                driver = await _bring_up(config, run, runtime, inputs, phases, progress, metrics, resume=resume)
                try:
                    await _stages(config, driver, phases)
                finally:
                    await driver.stop()


@dataclass(frozen=True)
class _Inputs:
    """What the config's sources are, or made."""

    model: Path
    teacher: Path | None
    rater: Rater | None
    tasks: list[TaskRef]
    heldout: list[TaskRef]


async def _inputs(config: Config, run: RunDir, runtime: Runtime, progress: Progress) -> _Inputs:
    progress.phase("inputs", "model and tasks")
    model, (tasks, heldout) = await asyncio.gather(runtime.learner_model(), runtime.tasks())
    teacher, rater = await runtime.teacher(model), rater_of(config, model)
    numbering.keep(run, numbering.of_config(config) | numbering.of_tasks(tasks, heldout))
    progress.done("inputs", f"{len(tasks)} training tasks, {len(heldout)} held-out")
    if config.tasks.heldout is None:
        progress.note("tasks.heldout is not set: nothing is evaluated")
    return _Inputs(model, teacher, rater, tasks, heldout)


async def _bring_up(
    config: Config, run: RunDir, runtime: Runtime, inputs: _Inputs, phases: PhaseLog, progress: Progress, metrics: MetricsWriter,
    *, resume: bool,
) -> Driver:  # fmt: skip
    async def serve():
        with phases.phase("serve"):
            progress.phase("serve", "starting the engine (a minute or two on CPUs)")
            client = await runtime.serve(inputs.model, next_incarnation(run))
            progress.done("serve", client.base_url)
            return client

    async def learner():
        demonstrations: Path | None = None
        if config.train.sft is not None and not any(run.checkpoints.glob("step-*")):
            with phases.phase("demonstrations"):
                progress.phase("demonstrations", "executing the teacher's episodes")
                demonstrations = await made_demonstrations(config.train.sft, run, config.seed)
                progress.done("demonstrations", str(demonstrations))
        exchange = start_exchange(run)
        return exchange, TrainerThread(config, run, inputs.model, demonstrations, exchange, inputs.teacher)

    client, (exchange, trainer) = await asyncio.gather(serve(), learner())
    driver = Driver(
        config, run, inputs.tasks, inputs.heldout,
        client=client, dispatch=runtime.pools(client), exchange=exchange, trainer=trainer, metrics=metrics, progress=progress,
        rater=inputs.rater,
    )  # fmt: skip
    if resume:
        driver.restore()
    with phases.phase("sft" if config.train.sft is not None and not resume else "weights"):
        await driver.first_weights()
    if resume:
        again = driver.replays
        progress.note(f"resuming at step {driver.version}; replaying {again} recorded batch{'es' * (again != 1)}")
    return driver


async def _stages(config: Config, driver: Driver, phases: PhaseLog) -> None:
    if config.eval.before and driver.fresh:
        with phases.phase("eval before"):
            await driver.evaluate("before")
    with phases.phase("train"):
        await driver.learn()
    if config.eval.after:
        with phases.phase("eval after"):
            await driver.evaluate("after")
