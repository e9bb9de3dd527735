"""A command below this process: what it hears, and that it does not outlive this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_ray.study.command import INTERRUPTED, obey

PROGRAM = """
import os, pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
heard = []
def hear(number, frame):
    heard.append(number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, hear)
(place / "started").write_text(str(os.getpid()))
while not heard:
    time.sleep(0.01)
time.sleep(0.2)  # as one who takes things down
(place / "heard").write_text(" ".join(map(str, heard)))
sys.exit(int(sys.argv[2]))
"""


def until(found: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_waited_out(tmp_path: Path, number: signal.Signals) -> None:
    def send() -> None:
        until((tmp_path / "started").exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert obey([sys.executable, "-c", PROGRAM, str(tmp_path), "7"]) == INTERRUPTED
    thread.join()
    assert (tmp_path / "heard").read_text() == str(int(number))
    assert obey([sys.executable, "-c", "import sys; sys.exit(3)"]) == 3


def test_a_command_ends_with_the_process_that_gave_it(tmp_path: Path) -> None:
    code = "import sys; from forge_ray.study.command import obey; obey(sys.argv[1:])"
    giver = subprocess.Popen([sys.executable, "-c", code, sys.executable, "-c", PROGRAM, str(tmp_path), "0"])
    until((tmp_path / "started").exists)
    giver.kill()
    giver.wait()
    heard = tmp_path / "heard"
    until(lambda: heard.exists() and heard.read_text())
    assert heard.read_text() == str(int(signal.SIGTERM))
