"""`metrics.jsonl` and `phases.jsonl`: durable, strict JSON, readable after a crash."""

from __future__ import annotations

import json
from pathlib import Path

from forge_ray.report.metrics import MetricsWriter, StepMetrics, read_evaluations, read_metrics
from forge_ray.report.phases import Phase, PhaseLog, read_phases, seconds_by_phase


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.append({"step": 1, "loss": float("nan"), "deep": {"values": [1.0, float("inf"), (float("-inf"),)]}})
    row = json.loads(path.read_text(), parse_constant=lambda name: (_ for _ in ()).throw(AssertionError(name)))
    assert row == {"step": 1, "loss": None, "deep": {"values": [1.0, None, [None]]}}
    assert read_metrics(path)[0].loss is None


def test_a_torn_line_is_removed_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"loss":0.5}\n{"step":2,"lo')
    assert [row.step for row in read_metrics(path)] == [1]
    with MetricsWriter(path) as metrics:
        metrics.append(StepMetrics(step=2, loss=0.25))
    assert [(row.step, row.loss) for row in read_metrics(path)] == [(1, 0.5), (2, 0.25)]
    assert len(path.read_text().splitlines()) == 2


def test_a_step_written_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for loss in (1.0, 2.0):
        with MetricsWriter(path) as metrics:
            for step in (1, 2):
                metrics.append({"event": "step", "step": step, "loss": loss + step})
    assert [(row.step, row.loss) for row in read_metrics(path)] == [(1, 3.0), (2, 4.0)]


def test_foreign_lines_are_left_out_and_evaluations_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n"text"\n{"event":"eval","label":"before","step":0,"pass@1":0.2}\n{"step":"x"}\n{"step":3}\n')
    assert [row.step for row in read_metrics(path)] == [3]
    assert {label: row["step"] for label, row in read_evaluations(path).items()} == {"before": 0}
    assert read_metrics(tmp_path / "missing") == []


def test_overlapping_phases_count_once_in_the_total(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    log = PhaseLog(path)
    for phase in (Phase("engine", 10.0, 30.0), Phase("sft", 15.0, 10.0), Phase("train", 50.0, 20.0), Phase("train", 100.0, 5.0)):
        log.add(phase)
    with path.open("a") as file:
        file.write('{"phase": "torn')
    assert seconds_by_phase(read_phases(path)) == {"engine": 30.0, "sft": 10.0, "train": 25.0, "total": 55.0}
    assert seconds_by_phase([]) == {"total": 0.0}


def test_a_phase_that_raises_is_timed(tmp_path: Path) -> None:
    log = PhaseLog(tmp_path / "phases.jsonl")
    try:
        with log.phase("serve"):
            raise KeyError
    except KeyError:
        pass
    (phase,) = read_phases(log.path)
    assert phase.name == "serve" and phase.seconds >= 0 and phase.started > 1e9
