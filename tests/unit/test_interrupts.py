"""Ctrl-C again and again, at every moment of a run: one clean end with exit code 130. Without Ray."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from forge_ray.job import threads

PROGRAM = """
import asyncio, sys, time
from pathlib import Path
from types import SimpleNamespace

sys.modules["ray"] = SimpleNamespace(shutdown=lambda: (print("ray", flush=True), time.sleep(1)))
from forge_ray.cli import main, train
from forge_ray.config import Config
from forge_ray.job import runtime
from forge_ray.job.cluster import Cluster
from forge_ray.run_dir import RunDir

phase = sys.argv[1]
config = Config.model_validate({"name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "a"}], "tasks": {"train": "t"}})

def connect(*_, **__):
    if phase == "connect":
        print("now", flush=True)
        for _ in range(20):
            time.sleep(0.1)
    return Cluster(owned=False, address="a", haproxy=True)

async def work():
    async with runtime.Runtime(config, RunDir(Path("."))) as up:
        up.connect()
        try:
            if phase == "run":
                print("now", flush=True)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1)
            print("stopped what ran", flush=True)

def run(_):
    try:
        asyncio.run(work())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        time.sleep(0.5)

runtime.connect, train.run = connect, run
code = main.main(["train", "x.yaml"])
time.sleep(0.5)  # as Ray's own end takes
sys.exit(code)
"""


@pytest.mark.parametrize("phase", ["connect", "run"])
@pytest.mark.parametrize("gap", [0.02, 0.3])
def test_repeated_interrupts_end_once_and_with_130(phase: str, gap: float, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, phase], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, bufsize=1,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "now\n"
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(gap)
    out, err = process.communicate()
    assert process.returncode == 130 and err == "forge-ray: interrupted\n", (process.returncode, out, err)
    if phase == "run":
        assert re.findall("stopped what ran|ray", out) == ["stopped what ran", "ray"], "nothing was cut short"


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None and process.stdout.readline() == "now\n"
    process.terminate()
    time.sleep(0.2)
    process.terminate()
    out, err = process.communicate()
    assert process.returncode == 130 and err == "forge-ray: interrupted\n" and "stopped what ran" in out


async def test_a_thread_whose_answer_is_there_is_in_ray_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is not shut down while one is, and the thread ends a moment later than its answer comes."""
    answer, go_on = Future.set_result, threading.Event()

    def and_stay(future: Future[Any], result: Any) -> None:
        answer(future, result)
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(60)

    monkeypatch.setattr(Future, "set_result", and_stay)
    asked = threads.call(lambda: threads.busy())
    assert await asked and not threads.busy()
    go_on.set()


BUSY = """
import atexit, sys, threading, time
from types import SimpleNamespace

sys.modules["ray"] = SimpleNamespace()
atexit.register(lambda: print("Ray's own end"))
from forge_ray.cli import main
from forge_ray.job import threads

if sys.argv[1] == "busy":
    threading.Thread(target=time.sleep, args=[60], name=threads.NAME, daemon=True).start()
sys.exit(main.main(["check", "nowhere.yaml"]))
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_a_command_leaves_at_once_while_a_thread_is_inside_ray(tmp_path: Path, state: str) -> None:
    done = subprocess.run([sys.executable, "-c", BUSY, state], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "no such file" in done.stderr
    assert ("Ray's own end" in done.stdout) is (state == "idle")
