"""The trainer: a Ray Train `TorchTrainer` that runs `worker.train_worker`, in a thread beside the driver's event loop.

`fit()` blocks, so it has a thread of its own; what it raises is given to whoever waits. Restarting a lost worker group is Ray Train's job
(`FailureConfig`); where it goes on is decided by the newest checkpoint on disk.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from pathlib import Path
from typing import Any

from forge_ray.config import Config
from forge_ray.errors import ForgeRayError
from forge_ray.run_dir import RunDir
from forge_ray.train_loop.exchange import Exchange

THREAD = "forge-ray trainer"
"""Name of the thread."""
ENDED = "forge-ray trainer, ended"
"""Its name once `fit` has returned."""


class TrainingFailed(ForgeRayError):
    """The train workers gave up; the message is their last error's."""


def start_exchange(run: RunDir) -> Any:
    """The run's Exchange actor; it ends with the job."""
    import ray

    return ray.remote(Exchange).options(num_cpus=0, max_concurrency=1000).remote(str(run.root))


class TrainerThread:
    """A running `TorchTrainer.fit`."""

    def __init__(
        self, config: Config, run: RunDir, model: Path, demonstrations: Path | None, exchange: Any, teacher: Path | None = None
    ) -> None:
        self._future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(config, run, model, demonstrations, exchange, teacher), name=THREAD, daemon=True
        )
        self._thread.start()

    def _run(self, *given: Any) -> None:
        try:
            _fit(*given)
        except BaseException as error:
            threading.current_thread().name = ENDED
            self._future.set_exception(error)
        else:
            threading.current_thread().name = ENDED
            self._future.set_result(None)

    def done(self) -> bool:
        return self._future.done()

    def check(self) -> None:
        """Raise `TrainingFailed` if the workers gave up."""
        if self._future.done() and (error := self._future.exception()) is not None:
            raise TrainingFailed(_reason(error)) from error

    async def wait(self) -> None:
        """Wait until every worker has returned; raises `TrainingFailed` if they gave up."""
        await asyncio.wait([asyncio.wrap_future(self._future)])
        self.check()


def _fit(config: Config, run: RunDir, model: Path, demonstrations: Path | None, exchange: Any, teacher: Path | None) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from forge_ray.train_loop.worker import train_worker

    train = config.train
    resources = {"CPU": train.worker_cpus, **({"GPU": train.worker_gpus} if train.worker_gpus else {})}
    TorchTrainer(
        train_worker,
        train_loop_config={
            "config": config.model_dump(mode="json"),
            "run": str(run.root),
            "model": str(model),
            "demonstrations": str(demonstrations) if demonstrations else None,
            "teacher": str(teacher) if teacher else None,
            "exchange": exchange,
        },
        scaling_config=ScalingConfig(num_workers=train.workers, use_gpu=train.worker_gpus > 0, resources_per_worker=resources),
        run_config=RunConfig(name="ray-train", storage_path=str(run.root), failure_config=FailureConfig(max_failures=train.restarts)),
    ).fit()


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line: Ray wraps worker errors in its own."""
    workers = getattr(error, "worker_failures", None)
    cause: BaseException = next(iter(workers.values())) if workers else error
    seen: set[int] = set()
    while id(cause) not in seen:
        seen.add(id(cause))
        inner = getattr(cause, "cause", None) or cause.__cause__
        if not isinstance(inner, BaseException):
            break
        cause = inner
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return (lines[-1].strip() if lines else repr(cause))[:500]
