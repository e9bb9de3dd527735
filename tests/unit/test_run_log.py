"""The run's log on a disk that is full."""

from __future__ import annotations

import logging
import subprocess
import sys

PROGRAM = """
import logging, sys
from pathlib import Path
from types import SimpleNamespace
from forge_ray.job.run_log import run_log
with run_log(SimpleNamespace(log=Path("/dev/full"))):
    logging.getLogger("x").warning("one")
print("went on")
"""


def test_a_full_disk_does_not_fill_the_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n") and "Logging error" not in done.stderr, done.stderr
    assert logging.raiseExceptions
