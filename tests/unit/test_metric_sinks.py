"""Sinks: the real readers of TensorBoard, MLflow and W&B see a run's numbers; a sink that fails or hangs harms nothing."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.report import sinks
from forge_ray.report.metrics import MetricsWriter, StepMetrics, read_metrics
from forge_ray.report.sinks.sink import Sink, numbers
from forge_ray.run_dir import RunDir

ROWS = [
    StepMetrics(step=1, version="1.1", reward_mean=0.25, loss=float("nan"), outcomes={"ok": 3, "harness": 1}).model_dump(),
    {"event": "eval", "step": 1, "name": "before", "pass_at_1": 0.5, "kinds": {"copy": {"pass_at_1": 1.0}}},
    StepMetrics(step=2, version="1.2", reward_mean=0.75, outcomes={"ok": 4}).model_dump(),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's first line makes its tables, which takes a busy machine longer than a run's end would wait."""
    monkeypatch.setattr(sinks, "CLOSE_S", 300.0)


def config_of(folder: Path, **metrics: Any) -> Config:
    return Config.model_validate(
        {
            "name": "x", "runs": str(folder), "policy": {"model": "m", "environment": {"SECRET": "hidden"}}, "tasks": {"train": "t"},
            "harnesses": [{"name": "react"}], "metrics": {"ray": False, **metrics},
        }
    )  # fmt: skip


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{module} is not installed")
        pytest.skip(f"{module} is not installed")


def write(folder: Path, warn: Callable[[str], None] | None = None, rows: list[Any] = ROWS, **metrics: Any) -> RunDir:
    """Without `warn` there is nothing to warn of."""
    run, warnings = RunDir(folder / "x").create(), []
    made = sinks.makers(config_of(folder, **metrics), run)
    assert set(made) == set(metrics)
    with MetricsWriter(run.metrics, sinks.Sinks(made, warn or warnings.append)) as writer:
        for row in rows:
            writer.append(row)
    assert warnings == []
    return run


def test_a_line_becomes_its_finite_numbers_by_name() -> None:
    step, values = numbers(ROWS[0])
    assert step == 1 and values == {"reward_mean": 0.25, "outcomes/ok": 3.0, "outcomes/harness": 1.0}
    assert numbers({"step": 2, "harnesses": {"/a/b.py:Own": {"valid": 8}}}) == (2, {"harnesses/Own/valid": 8.0}), "names that MLflow takes"
    assert numbers(ROWS[1]) == (1, {"eval/pass_at_1": 0.5, "eval/kinds/copy/pass_at_1": 1.0})


def test_tensorboard_reads_them(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = write(tmp_path, tensorboard="events")
    write(tmp_path, tensorboard="events", rows=[StepMetrics(step=3, reward_mean=1.0)])
    found = EventAccumulator(str(run.root / "events")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward_mean")] == [(1, 0.25), (2, 0.75), (3, 1.0)]
    assert [(event.step, event.value) for event in found.Scalars("eval/pass_at_1")] == [(1, 0.5)]
    assert "loss" not in found.Tags()["scalars"]


def test_mlflow_reads_them_and_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    needs("mlflow")
    from mlflow.tracking import MlflowClient

    run = write(tmp_path, mlflow={"tags": {"team": "a"}})
    odd = {"event": "eval", "step": 3, "kinds": {"c++ (hard)": {"pass_at_1": 1.0}, "../up//": {"pass_at_1": 0.5}}}
    write(tmp_path, mlflow={}, rows=[StepMetrics(step=3, reward_mean=1.0), odd])
    client = MlflowClient(f"sqlite:///{run.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("forge-ray")
    assert experiment is not None
    (stored,) = client.search_runs([experiment.experiment_id])
    assert stored.info.run_name == "x" and stored.info.status == "FINISHED" and stored.data.tags["team"] == "a"
    assert [(m.step, m.value) for m in client.get_metric_history(stored.info.run_id, "reward_mean")] == [(1, 0.25), (2, 0.75), (3, 1.0)]
    assert stored.data.metrics["eval/kinds/c__ _hard_/pass_at_1"] == 1.0 and stored.data.metrics["eval/kinds/_/up/_/_/pass_at_1"] == 0.5
    assert stored.data.params["train.loss.name"] == "grpo" and "hidden" not in str(stored.data.params)


def _records(file: bytes) -> Iterator[bytes]:
    """Of a `.wandb` file: LevelDB's log format behind a header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(file):
        if (left := 32768 - at % 32768) < 7:  # a block's end is padded
            at += left
            continue
        length, kind = int.from_bytes(file[at + 4 : at + 6], "little"), file[at + 6]
        if at + 7 + length > len(file):  # it is being written
            return
        whole += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def test_wandb_writes_them_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = write(tmp_path, wandb={"mode": "offline", "options": {"tags": ["t"], "settings": {"disable_git": True, "disable_code": True}}})
    (file,) = (run.root / "wandb").glob("offline-run-*/run-*.wandb")
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record
    seen: list[dict[str, str]] = []
    deadline = time.monotonic() + 60  # the file is another process's, which may end after us
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
        records = [record_type.FromString(data) for data in _records(file.read_bytes())]
        history = [record.history for record in records if record.HasField("history")]
        seen = [{".".join(item.nested_key) or item.key: item.value_json for item in row.item} for row in history]
    assert [(row["step"], row.get("reward_mean"), row.get("eval/pass_at_1")) for row in seen] == [
        ("1", "0.25", None), ("1", None, "0.5"), ("2", "0.75", None),
    ]  # fmt: skip
    assert b"hidden" not in file.read_bytes()


class Broken:
    name = "broken"

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._seen.append(step)
        raise ConnectionError("no\nroute")

    def close(self) -> None:
        raise OSError("still none")


def test_a_sink_that_fails_warns_once_is_tried_again_and_stops_nothing(tmp_path: Path) -> None:
    warned, seen, good = [], [], []

    class Good(Broken):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            good.append(step)

    makers: dict[str, Callable[[], Sink]] = {"broken": lambda: Broken(seen), "good": lambda: Good([])}
    with MetricsWriter(tmp_path / "m.jsonl", sinks.Sinks(makers, warned.append)) as writer:
        for row in ROWS:
            writer.append(row)
    assert seen == good == [1, 1, 2] and len(read_metrics(tmp_path / "m.jsonl")) == 2
    assert warned[0] == "metrics.broken: ConnectionError: no route (warned once; the run goes on)" and len(warned) == 2


def test_a_sink_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "LINES", 2)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.05)
    warned, free = [], threading.Event()

    class Slow(Broken):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            free.wait()

        def close(self) -> None:
            pass

    try:
        with MetricsWriter(tmp_path / "m.jsonl", sinks.Sinks({"slow": lambda: Slow([])}, warned.append)) as writer:
            for step in range(9):
                writer.append(StepMetrics(step=step))
        assert len(read_metrics(tmp_path / "m.jsonl")) == 9
        assert any("2 lines wait" in text for text in warned) and any("not done after" in text for text in warned) and len(warned) == 2
    finally:
        free.set()


def test_a_package_that_is_missing_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sinks.PACKAGES, "wandb", "no_such_module")
    with pytest.raises(UserError, match=r"no_such_module is not installed") as caught:
        sinks.makers(config_of(tmp_path, wandb={}), RunDir(tmp_path))
    assert caught.value.where == "metrics.wandb" and "EXTRAS=cpu,wandb" in str(caught.value.fix)
    assert sinks.missing(config_of(tmp_path, tensorboard=None)) == []
