"""The driver's log has what the terminal showed, and how the run ended."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from forge_ray.errors import UserError
from forge_ray.job.run_log import run_log
from forge_ray.job.runtime import RunFailed
from forge_ray.report.metrics import StepMetrics
from forge_ray.report.progress import Progress
from forge_ray.run_dir import RunDir

FULL = """
import logging
from pathlib import Path
from types import SimpleNamespace
from forge_ray.job.run_log import run_log
with run_log(SimpleNamespace(log=Path("/dev/full"))):
    logging.getLogger("x").warning("one")
print("went on")
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield RunDir(tmp_path)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.handlers[:] = handlers
    logging.raiseExceptions = True
    root.setLevel(level)


def lines(run: RunDir) -> list[str]:
    return run.log.read_text().splitlines()


@pytest.mark.parametrize("terminal", [True, False])
def test_it_has_phases_steps_and_warnings_with_times(run: RunDir, terminal: bool) -> None:
    with run_log(run), Progress(2, console=Console(file=io.StringIO(), force_terminal=terminal, width=200)) as progress:
        progress.phase("serve", "starting the engine")
        progress.done("serve", "http://127.0.0.1:1")
        progress.step(StepMetrics(step=1, groups=8, degenerate_groups=5))
        progress.warn("step 1: odd")
    words = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", "", line) for line in lines(run)]
    found = [line.split(": ", 1)[1] for line in words[1:]]
    assert found[0] == "serve starting the engine" and found[1] == "serve: done (http://127.0.0.1:1)"
    assert found[2].startswith("step 1/2 · reward") and "signal 3/8" in found[2]
    assert found[3:] == ["step 1: odd", "ended: complete"] and words[4].startswith("WARNING")


def test_a_failure_has_its_traceback_and_is_one_line_outside(run: RunDir) -> None:
    with pytest.raises(RunFailed, match=r"ValueError: deep; the traceback is in .*run\.log"), run_log(run):
        raise ValueError("deep")
    assert 'raise ValueError("deep")' in run.log.read_text()
    with pytest.raises(RunFailed, match=r"^nothing works$"), run_log(run):
        raise RunFailed("nothing works")
    text = run.log.read_text()
    assert "ended: failed: nothing works" in text and 'raise RunFailed("nothing works")' in text


def test_a_stop_and_bad_input_are_told_without_one(run: RunDir) -> None:
    with pytest.raises(asyncio.CancelledError), run_log(run):
        raise asyncio.CancelledError
    with pytest.raises(UserError), run_log(run):
        raise UserError("no such thing", where="here", fix="go there")
    text = run.log.read_text()
    assert "ended: stopped by a signal" in text and "ended: refused: here: no such thing" in text and "Traceback" not in text


def test_a_full_disk_does_not_fill_the_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n") and "Logging error" not in done.stderr, done.stderr
