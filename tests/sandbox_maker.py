"""Process sandboxes for tests, and a look at which processes are alive."""

from __future__ import annotations

import asyncio
import os
import secrets
import textwrap
from pathlib import Path
from typing import Any, Literal

import pytest

from forge_ray.config import Sandbox as SandboxConfig
from forge_ray.sandboxes import bubblewrap
from forge_ray.sandboxes.process import ProcessBackend, ProcessSandbox
from forge_ray.tasks.task import load_task
from tests.task_maker import make_task

LONG = 120.0
"""A deadline that no test reaches."""

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.chdir("/")
for fd in range(20):
    try: os.close(fd)
    except OSError: pass
os.execve("/bin/sh", ["sh", "-c", "trap '' TERM HUP INT; while :; do sleep 0.1; done; : TOKEN"], {})
"""
"""A process that has left parent, group, session, directory, environment and every open file, and ignores what can be ignored."""


def needs_bubblewrap() -> None:
    """Skip where bubblewrap does not work; fail where it must."""
    try:
        bubblewrap.probe()
    except bubblewrap.Unavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


def token() -> str:
    """A word that marks processes on their command line."""
    return f"mark{secrets.token_hex(8)}"


def alive(mark: str) -> list[int]:
    """Processes with `mark` on their command line."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                command = Path("/proc", name, "cmdline").read_bytes()
                state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            # The helpers that carry the whole script as an argument do not count, but what they started.
            if mark.encode() in command and state != "Z" and b"ORPHAN" not in command and b"forge_ray.sandboxes" not in command:
                found.append(int(name))
    return found


async def gone(mark: str) -> None:
    """Wait until no process with `mark` is alive."""
    while alive(mark):
        await asyncio.sleep(0.05)


class Maker:
    """Sandboxes of one run below `root`, with one isolation."""

    def __init__(self, root: Path, isolation: Literal["bubblewrap", "none"]) -> None:
        self.root, self.directory, self.logs = root, root / "task", root / "logs"
        self.isolation: Literal["bubblewrap", "none"] = isolation

    def task(self, **parts: Any) -> Path:
        return make_task(self.directory, **parts)

    def backend(self, **config: Any) -> ProcessBackend:
        return ProcessBackend(SandboxConfig(isolation=self.isolation, directory=str(self.root / "sandboxes"), **config), "run")

    async def sandbox(self, rollout: str = "g0-0.0", **config: Any) -> ProcessSandbox:
        if not self.directory.exists():
            self.task()
        return await self.backend(**config).create(load_task(self.directory), rollout, self.logs)

    def clean(self) -> bool:
        """Whether no sandbox is left."""
        return not os.path.lexists(self.root / "sandboxes" / "run")


def python(code: str) -> list[str]:
    return ["python3", "-c", textwrap.dedent(code)]
