"""Two train workers under Ray Train, fed as the driver feeds them: one is killed, the group goes on from its checkpoint, and every step is
the one that a single process makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import torch

from forge_ray.config import Config
from forge_ray.run_dir import RunDir
from forge_ray.train_loop import checkpoint, forward
from forge_ray.trajectories import split
from forge_ray.trajectories.schema import SCHEMA
from tests.integration.conftest import make_run
from tests.unit import learning

STEPS = 5


def table(step: int, weights: Path) -> pa.Table:
    """The batch of `step`, as an engine with these weights would have recorded it."""
    from safetensors.torch import load_file

    model = learning.small_model()
    model.load_state_dict(load_file(weights), strict=False)
    rows = []
    for number, row in enumerate(learning.rollouts(step, count=5)):
        with torch.no_grad():
            row.old_logprobs = forward.token_logprobs(model, forward.collate([row]))[0].numpy()
        length = len(row.ids)

        def spread(values: Any, fill: Any, row: Any = row, length: int = length) -> list[Any]:
            whole = [fill] * length
            for position, value in zip(row.positions.tolist(), values, strict=True):
                whole[position] = value
            return whole

        rows.append(
            {
                "rollout": row.name, "group": step, "task": "t", "harness": "h", "sample": 0, "samples": 1, "ids": row.ids.tolist(),
                "mask": spread([True] * 5, False), "logprobs": spread(row.old_logprobs.tolist(), 0.0), "steps": spread([step] * 5, -1),
                "temperature": spread(row.temperature.tolist(), 1.0), "call": spread([0] * 5, -1),
                "advantage": spread(row.advantages.tolist(), 0.0), "weight": spread([1.0] * 5, 0.0), "reward": float(number % 2),
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows, SCHEMA)


def train_worker() -> psutil.Process | None:
    """One of the group's processes."""
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.cmdline() or [""])[0].startswith("ray::") and "TrainWorker" in process.cmdline()[0]:
                return process
        except psutil.Error:
            continue
    return None


@pytest.mark.timeout(300)
def test_a_killed_worker_costs_the_steps_since_the_checkpoint_and_nothing_else(cluster: None, tmp_path: Path) -> None:
    import ray

    from forge_ray.train_loop.trainer import TrainerThread, start_exchange

    run = make_run(tmp_path / "run")
    folder = learning.with_model(tmp_path)
    settings = learning.config(
        steps=STEPS, workers=2, checkpoint_every=2, restarts=1, threads=1, loss={"kl": 0.01}, optimizer={"lr": 1e-3, "epochs": 2}
    )
    exchange = start_exchange(run)
    trainer = TrainerThread(settings, run, folder / "model", None, exchange)
    tables: dict[int, pa.Table] = {}
    losses: dict[int, list[float]] = {}
    starts: list[int] = []
    labels: set[str] = set()
    seen = 0
    while not (ended := trainer.done()) or seen < len(ray.get(exchange.events.remote(0, 0.1))):
        for event in ray.get(exchange.events.remote(seen, 0.1 if ended else 2.0)):
            seen += 1
            assert event["kind"] != "failed", event
            if event["kind"] == "checkpoint":
                ray.get(exchange.forget_before.remote(event["step"]))
            if event["kind"] != "weights":
                continue
            step, weights = event["step"], Path(event["path"])
            assert event["version"] not in labels, "a label never comes back with other weights"
            labels.add(event["version"])
            if event["metrics"] is None:
                starts.append(step)
            else:
                losses.setdefault(step, []).append(event["metrics"]["loss"])
            if step == 3 and len(starts) == 1:
                worker = train_worker()
                assert worker is not None
                worker.kill()
            if step < STEPS and step not in tables:
                tables[step] = table(step, weights)
            if step < STEPS:
                parts = split.split(tables[step], 2)
                ray.get(exchange.put_step.remote(step, [ray.put(part) for part in parts], {}))
    trainer.check()
    assert starts == [0, 2], "once from the beginning, once from the checkpoint of step 2"
    assert sorted(losses) == list(range(1, STEPS + 1)) and len(losses[3]) == 2
    assert losses[3][0] == losses[3][1], "the step that was made twice is the same step"
    assert checkpoint.latest(run) == STEPS
    _as_one_process(settings, folder, tables, [found[-1] for _, found in sorted(losses.items())], run)


def _as_one_process(settings: Config, folder: Path, tables: dict[int, pa.Table], losses: list[float], run: RunDir) -> None:
    (folder / "alone").mkdir()
    (folder / "alone" / "model").symlink_to(folder / "model")
    alone = learning.learner_of(settings, folder / "alone")
    assert [alone.train(alone.part(tables[step]))["loss"] for step in range(STEPS)] == pytest.approx(losses, abs=1e-5)
    from safetensors.torch import load_file

    saved = load_file(checkpoint.path(run, STEPS) / "model.safetensors")
    for name, value in alone.strategy.tensors():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)
