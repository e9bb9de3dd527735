"""Sinks: where a run's numbers go besides `metrics.jsonl`, by `metrics` of the config.

Invariants: a run never waits for a sink and never ends by one. All of them live in one thread behind a bounded queue; what raises is warned
about once per sink and tried again with the next line; a line that finds the queue full is left out, which is warned about once too.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.report.sinks.sink import Sink, numbers
from forge_ray.run_dir import RunDir

LINES = 1000
"""Lines that may wait."""
CLOSE_S = 30.0
"""How long the end of a run waits for what the sinks still have to send."""
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Key in `metrics`, which is also the extra's name -> module that it needs."""

Maker = Callable[[], Sink]


def missing(config: Config) -> list[UserError]:
    """One error for each sink that is asked for and whose package is not there."""
    return [
        UserError(f"the package {module} is not installed", where=f"metrics.{key}", fix=f"make env EXTRAS=cpu,{key}, or leave it out")
        for key, module in PACKAGES.items()
        if getattr(config.metrics, key) is not None and importlib.util.find_spec(module) is None
    ]


def makers(config: Config, run: RunDir) -> dict[str, Maker]:
    """How to make each sink that the config asks for. Raises `UserError` where a package is missing."""
    for error in missing(config):
        raise error
    asked, found = config.metrics, {}
    flat = described(config)
    if asked.ray:

        def ray_metrics() -> Sink:
            from forge_ray.report.sinks.ray_metrics import RayMetrics

            return RayMetrics(config.name)

        found["ray"] = ray_metrics
    if (folder := asked.tensorboard) is not None:

        def tensorboard() -> Sink:
            from forge_ray.report.sinks.tensorboard import TensorBoard

            return TensorBoard(run.root / Path(folder).expanduser())

        found["tensorboard"] = tensorboard
    if (wandb := asked.wandb) is not None:

        def weights_and_biases() -> Sink:
            from forge_ray.report.sinks.wandb import WeightsAndBiases

            return WeightsAndBiases(wandb, config.name, run.root, flat)

        found["wandb"] = weights_and_biases
    if (mlflow := asked.mlflow) is not None:

        def mlflow_run() -> Sink:
            from forge_ray.report.sinks.mlflow import MlflowRun

            return MlflowRun(mlflow, config.name, run.root, flat)

        found["mlflow"] = mlflow_run
    return found


class Sinks:
    """All sinks of a run, in a thread of their own."""

    def __init__(self, makers: Mapping[str, Maker], warn: Callable[[str], None]) -> None:
        """`warn` is called from that thread."""
        self._makers, self._warn = makers, warn
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(LINES)
        self._open: dict[str, Sink] = {}
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="metric-sinks", daemon=True)
        if makers:
            self._thread.start()

    def send(self, row: Mapping[str, Any]) -> None:
        """Hand a line on; returns at once."""
        if not self._makers:
            return
        try:
            self._lines.put_nowait(row)
        except queue.Full:
            self._once("", f"metrics: {LINES} lines wait for the sinks; further ones are only in metrics.jsonl")

    def close(self) -> None:
        """Send what waits, as far as it goes in time."""
        if not self._makers:
            return
        with suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"metrics: the sinks were not done after {CLOSE_S:g} s; metrics.jsonl has every line")

    def _work(self) -> None:
        while (row := self._lines.get()) is not None:
            step, values = numbers(row)
            for name in self._makers:
                self._try(name, lambda sink, at=step, given=values: sink.write(at, given))
        for name in list(self._open):
            self._try(name, lambda sink: sink.close())

    def _try(self, name: str, act: Callable[[Sink], None]) -> None:
        try:
            if name not in self._open:
                self._open[name] = self._makers[name]()
            act(self._open[name])
        except Exception as error:  # whatever a foreign package raises
            self._once(name, f"metrics.{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]} (warned once; the run goes on)")

    def _once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._warn(text)


def described(config: Config) -> dict[str, Any]:
    """What tells runs apart, by dotted key. Environments and options of programs, which may hold secrets, are not in it."""
    chosen = config.model_dump(mode="json", include={"seed", "rollouts", "train", "eval"})
    return {
        "policy.model": config.policy.model.path,
        "harnesses": ", ".join(harness.name for harness in config.harnesses),
        "tasks.train": config.tasks.train.path,
        **dict(_leaves(chosen, "")),
    }


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
