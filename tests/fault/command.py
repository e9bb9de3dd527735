"""`forge-ray` as a process of its own, watched from outside: what it started, and what of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart" / "run.yaml"
MARK = "FORGE_RAY_TEST_RUN"
T = TypeVar("T")


class Watched:
    """A process and what it starts. `parts` are the processes seen below it, collected by `watch`: Ray renames its workers over their
    environment, so a mark alone would miss them."""

    def __init__(self, process: subprocess.Popen[Any], output: Path) -> None:
        self.process, self.output = process, output
        self.parts: set[psutil.Process] = set()

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def watch(self) -> list[psutil.Process]:
        """Every process below it now."""
        try:
            now = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.parts.update(now)
        return now

    def until(self, what: str, found: Callable[[], T | None], seconds: float = 300) -> T:
        """Wait until `found` gives something; the process must not end before."""
        end = time.monotonic() + seconds
        while not (value := found()):
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.text[-6000:]}"
            assert time.monotonic() < end, f"{what} has not come in {seconds:.0f} s:\n{self.text[-6000:]}"
            self.watch()
            time.sleep(0.1)
        return value


class Command(Watched):
    """One `forge-ray` process in a process group of its own, as a shell starts it; use as a context manager."""

    def __init__(self, *words: str, directory: Path, environment: dict[str, str] | None = None, remove: tuple[str, ...] = ()) -> None:
        self.mark = uuid.uuid4().hex
        output = directory / f"output-{self.mark[:8]}.txt"
        variables = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", *remove)}
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "forge_ray.cli.main", *words],
                cwd=directory,
                env=variables | {MARK: self.mark} | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        super().__init__(process, output)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing may outlive a test, also a failing one."""
        self.watch()
        for process in (*self.parts, *self.marked()):
            if process.is_running():
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def find(self, title: str) -> psutil.Process | None:
        """The process below the command whose command line begins with `title`."""
        for process in self.watch():
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                    return process
            except psutil.Error:
                continue
        return None

    def wait(self, seconds: float = 400) -> int:
        """Wait for the end, watching; returns the exit code."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, f"still running after {seconds:.0f} s:\n{self.text[-6000:]}"
            self.watch()
            time.sleep(0.25)
        return self.process.returncode

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends SIGINT to the whole foreground process group."""
        self.watch()
        os.killpg(self.process.pid, signal.SIGINT)

    def marked(self) -> list[psutil.Process]:
        """Processes with the command's mark in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left(self, seconds: float = 60) -> list[str]:
        """Command lines of what still runs some time after the end."""
        _, alive = psutil.wait_procs(list(self.parts | set(self.marked())), timeout=seconds)
        lines = []
        for process in alive:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            except psutil.Error:
                continue
        return lines


def small_run(policy: Path, directory: Path, name: str, port: int, *, steps: int) -> list[str]:
    """Arguments of `forge-ray train`: the quickstart from the prepared policy, four groups of four a step, no evaluation."""
    return [
        *("train", str(QUICKSTART), f"name={name}", f"runs={directory / 'runs'}", f"sandbox.directory={directory / 'sandboxes'}"),
        *("ray.address=local", f"proxy.port={port}", f"policy.model={policy}", "train.sft=null", f"train.steps={steps}"),
        *("train.groups_per_step=4", "train.group_size=4", "rollouts.max_in_flight=16", "tasks.train.options.count=24"),
        *("eval.before=false", "eval.after=false", "tasks.heldout=null"),
    ]


def sandboxes(directory: Path) -> list[str]:
    """What is below the sandboxes' directory."""
    return [str(path) for path in sorted((directory / "sandboxes").glob("*/*"))]
