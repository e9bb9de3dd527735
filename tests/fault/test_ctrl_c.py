"""Ctrl-C while a run comes up and while it trains: exit code 130, a word how to go on, and nothing left behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from forge_ray.report.metrics import read_metrics
from forge_ray.run_dir import RunDir
from tests.fault.command import Command, sandboxes, small_run

pytestmark = pytest.mark.timeout(900)


def _sft(policy: Path) -> list[str]:
    """Overrides for an SFT that does not end by itself."""
    return [f"train.sft={{demonstrations: {policy / 'demonstrations'}, steps: 100000}}"]


def _stopped(command: Command, run: RunDir, directory: Path, record_property) -> None:
    began = time.monotonic()
    command.interrupt()
    code = command.wait()
    seconds = time.monotonic() - began
    record_property("seconds", round(seconds, 1))
    print(f"ended {seconds:.1f} s after Ctrl-C")
    assert code == 130, command.text[-6000:]
    # Ray may have a word of its own after them.
    assert {f"stopped; continue with: forge-ray train --resume {run.root}", "forge-ray: interrupted"} <= set(command.text.splitlines()[-6:])
    assert "Traceback" not in command.text
    assert command.left() == []
    assert sandboxes(directory) == []
    log = run.log.read_text()
    assert "SIGINT: stopping" in log and "ended: stopped by a signal" in log and "Ray: done" in log
    (below,) = re.findall(r"its logs below (\S+)", log)
    session = Path(below)
    end = time.monotonic() + 60
    while session.exists():
        assert time.monotonic() < end, f"{session} was not removed"
        time.sleep(0.2)
    assert not list(session.parent.glob(f"session_*_{command.process.pid}")), "a call that was under way has started another cluster"


def test_while_the_engine_starts_and_sft_runs(policy: Path, tmp_path: Path, record_property) -> None:
    run = RunDir(tmp_path / "runs" / "start")
    with Command(*small_run(policy, tmp_path, "start", 18771, steps=2), *_sft(policy), directory=tmp_path) as command:
        command.until("SFT or the engine", lambda: re.search(r"serve starting|sft step", command.text))
        command.until("the engine's process", lambda: command.find("ray::ServeReplica"))
        _stopped(command, run, tmp_path, record_property)
    assert not (run.checkpoints / "step-000000").exists() and read_metrics(run.metrics) == []


def test_while_it_trains(policy: Path, tmp_path: Path, record_property) -> None:
    run = RunDir(tmp_path / "runs" / "training")
    with Command(*small_run(policy, tmp_path, "training", 18772, steps=1000), directory=tmp_path) as command:
        command.until("two steps", lambda: len(read_metrics(run.metrics)) >= 2)
        command.until("rollouts in flight", lambda: sandboxes(tmp_path))
        _stopped(command, run, tmp_path, record_property)
    assert (run.data / "samples/step=1/batch.parquet").is_file()
    assert re.search(r"^\d{4}-\d\d-\d\d [\d:,]+ INFO .*: step 2/1000 · reward .* · signal \d/4 · ", run.log.read_text(), re.MULTILINE)
