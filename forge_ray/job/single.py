"""What runs outside training: one rollout (`forge-ray rollout`), the held-out tasks (`heldout`), the proxy alone.

Each gets a run directory of its own beside the training run's, so that nothing that is evaluated can be taken for training data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import library, stall, state
from forge_ray.job.run_log import run_log
from forge_ray.job.runtime import Runtime
from forge_ray.job.scheduler import TaskRef
from forge_ray.job.sources import SourceError
from forge_ray.model_files import policy_problem
from forge_ray.report.progress import Progress
from forge_ray.rollout import RolloutRecord, RolloutRequest
from forge_ray.run_dir import RunDir, next_incarnation

if TYPE_CHECKING:
    from forge_ray.serve_proxy.client import ProxyClient
    from forge_ray.trajectories.call import Call

T = TypeVar("T")


def checkpoint(config: Config, where: str | None, option: str = "--checkpoint") -> Path | None:
    """A model directory from `option`: a path, `latest` of the config's run, or `initial` or None for the initial model."""
    if where in (None, "initial"):
        return None
    if where == "latest":
        from forge_ray.train_loop.checkpoint import latest
        from forge_ray.train_loop.export import whole

        run = RunDir(Path(config.runs) / config.name)
        step = latest(run)
        if step is None:
            raise UserError(f"{run.root} has no checkpoint", where=f"{option} latest", fix="train first, or give a checkpoint directory")
        return whole(run, step)
    directory = _with_adapters_merged(Path(where).expanduser().resolve())
    if (problem := policy_problem(config.policy, directory)) is not None:
        raise UserError(problem, where=option, fix="give <run>/checkpoints/step-…")
    return directory


def _with_adapters_merged(directory: Path) -> Path:
    """A model directory in place of a run's checkpoint of adapters; any other directory is itself."""
    from forge_ray.train_loop import checkpoint, export

    found = checkpoint.NAME.fullmatch(directory.name)
    if found is None or not export.is_adapter(directory):
        return directory
    return export.whole(RunDir(directory.parents[1]), int(found.group(1)))


def side_run(config: Config, what: str) -> tuple[Config, RunDir]:
    """A run directory for this command: `<name>-<what>-<time>`."""
    config = config.model_copy(update={"name": f"{config.name[:40]}-{what}-{time.strftime('%Y%m%d-%H%M%S')}"})
    return config, state.create(config, training=False)


def run_one(config: Config, run: RunDir, task: str, harness: str, model: Path | None) -> RolloutRecord:
    """One rollout of `harness` at `task` (a name or a directory)."""
    found: list[TaskRef] = []

    async def first(runtime: Runtime) -> None:
        found.append(await _find_task(runtime, task))

    async def work(runtime: Runtime, progress: Progress) -> RolloutRecord:
        (reference,) = found
        client = await start_proxy(runtime, progress, model)
        progress.phase("rollout", f"{harness} at {reference.name}")
        request = RolloutRequest(key="single", purpose="eval", task=reference.path, task_name=reference.name, harness=harness)
        return await runtime.pools(client).run(request)

    return in_runtime(config, run, work, first)


def calls(run: RunDir, record: RolloutRecord) -> list[Call]:
    """The recorded calls of a rollout, by completion."""
    return library.Recordings(run).with_calls([record])[0][1]


def in_runtime(
    config: Config,
    run: RunDir,
    work: Callable[[Runtime, Progress], Awaitable[T]],
    first: Callable[[Runtime], Awaitable[T | None]] | None = None,
) -> T:
    """Run the coroutine function `work(runtime, progress)` with Ray up, and take everything down again; its result. `first(runtime)` comes
    before Ray starts, which it does not where that has the result already. A command that is refused leaves no run directory."""

    async def main() -> T:
        with Progress(title=config.name) as progress:
            async with Runtime(config, run) as runtime:
                if first is not None:
                    progress.phase("inputs", "tasks")
                    result = await first(runtime)
                    progress.done("inputs")
                    if result is not None:
                        return result
                progress.phase("Ray", "starting")
                runtime.connect()
                runtime.require_resources(training=False)
                progress.done("Ray", str(run.root))
                async with stall.watch(progress):
                    return await work(runtime, progress)

    try:
        with run_log(run):
            return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except UserError as error:
        state.discard(run, but_logs=isinstance(error, SourceError))
        raise


async def start_proxy(runtime: Runtime, progress: Progress, model: Path | None) -> ProxyClient:
    """Serve `model` (default: the initial one) under a fresh incarnation."""
    progress.phase("serve", "starting the engine (a minute or two on CPUs)")
    client = await runtime.serve(model or await runtime.model(), next_incarnation(runtime.run))
    progress.done("serve", f"{client.base_url}, weights of {model or 'the initial policy'}")
    return client


async def _find_task(runtime: Runtime, task: str) -> TaskRef:
    if Path(task).is_dir():
        from forge_ray.tasks.task import load_task

        loaded = load_task(Path(task).resolve())
        return TaskRef(loaded.name, str(loaded.directory))
    train, heldout = await runtime.tasks()
    for reference in (*train, *heldout):
        if task in (reference.name, Path(reference.path).name):
            return reference
    some = ", ".join(reference.name for reference in train[:5])
    raise UserError(f"no task {task!r}", where="--task", fix=f"give a task directory, or a name such as {some}")
