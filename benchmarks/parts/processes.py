"""The processes of a benchmark: children that are told what to do by lines, and which of all processes serve whom."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.seeds import MARK, marked

STARTS_S = 300.0
"""Longest time that a server may take to start, seconds."""


def free_ports() -> list[int]:
    """Four ports with some hundred free ones behind each, as far as one can tell."""
    start = 21000 + os.getpid() % 40 * 100
    found = []
    for port in range(start, 32000, 500):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == 4:
            return found
    raise RuntimeError("no free ports between 21000 and 32000")


class Child:
    """A child process that ends when its standard input is closed, and answers in lines of JSON."""

    def __init__(
        self, name: str, command: list[str], *, mark: str | None = None, environment: dict[str, str] | None = None, quiet: bool = False
    ) -> None:
        self.name = name
        own = {**os.environ, **(environment or {}), **({MARK: mark} if mark else {})}
        errors = subprocess.DEVNULL if quiet else subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=own)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        if not quiet:
            threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # others say things there, too
                self._lines.put(line)
        self._lines.put(None)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-40:], line]

    def line(self) -> str:
        """The next line of JSON that it prints. Raises `RuntimeError` if it ends before."""
        try:
            line = self._lines.get(timeout=STARTS_S)
        except queue.Empty:
            line = None
        if line is None:
            raise RuntimeError(f"{self.name} gave no answer: {''.join(self._errors)[-3000:]}")
        return line

    def ask(self, order: dict[str, Any]) -> Any:
        """Send an order and wait for what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self.line())
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def wait_for_port(self, port: int) -> None:
        """Wait until it listens."""
        deadline = time.monotonic() + STARTS_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"{self.name} does not listen on port {port}")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(3 if self.name == "litellm" else 60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()


@dataclass
class _Server:
    base: str
    fixed: list[int]
    mark: str | None
    deployment: str
    calls: Path | None
    known: dict[tuple[int, bytes], bool] = field(default_factory=dict)


class Servers:
    """Whom a load can go to."""

    def __init__(self) -> None:
        self._all: dict[str, _Server] = {}
        self.names: list[str] = []

    def add(
        self,
        name: str,
        base: str,
        pids: list[int] | None = None,
        *,
        mark: str | None = None,
        deployment: str = "",
        calls: Path | None = None,
    ) -> None:
        """`pids` serve; with `mark`, the replicas of `deployment` and the proxies among those that carry it in their environment."""
        self._all[name] = _Server(base, pids or [], mark, deployment, calls)
        self.names.append(name)

    def base(self, name: str) -> str:
        return self._all[name].base

    def pids(self, name: str) -> list[int]:
        """The processes through which a call of this server goes."""
        server = self._all[name]
        found = list(server.fixed)
        for pid in marked(server.mark, server.known) if server.mark else ():
            try:
                process = psutil.Process(pid)
                title = " ".join(process.cmdline()[:1])
                if process.name() == "haproxy" or _serves(title, server.deployment):
                    found.append(pid)
            except psutil.NoSuchProcess:
                continue
        return found

    def log_bytes(self, name: str) -> int:
        """Size of its call log."""
        calls = self._all[name].calls
        return sum(file.stat().st_size for file in calls.glob("*.jsonl")) if calls is not None else 0


def _serves(title: str, deployment: str) -> bool:
    return (title.startswith("ray::ServeReplica:") and f":{deployment}" in title) or "ProxyActor" in title or "HAProxyManager" in title


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(text, file=sys.stderr, flush=True)
