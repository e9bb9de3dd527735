"""The picture of reward curves."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from forge_ray.report.plot import main, plot_rewards
from forge_ray.run_dir import RunDir


def write_run(root: Path, rows: list[dict[str, float | None]]) -> RunDir:
    root.mkdir()
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDir(root)


def test_runs_of_any_length_are_drawn(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [{"step": step, "reward_mean": step / 10, "reward_ci": 0.1} for step in range(1, 9)]),
        write_run(tmp_path / "b", []),
        write_run(tmp_path / "c", [{"step": 1, "reward_mean": None}]),
    ]
    for number, chosen in enumerate(([runs[0]], runs, [runs[1]])):
        png = plot_rewards(chosen, tmp_path / "out" / f"{number}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", png[16:24])
        assert width > 1000 and height > 500


def test_a_directory_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2 and "has no metrics.jsonl" in capsys.readouterr().err
