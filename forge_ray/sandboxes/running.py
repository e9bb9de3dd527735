"""Runs one command of a sandbox to its end, within its deadline, and makes sure that nothing of it is left.

No Python is started for it and no thread waits: the process is watched through a pidfd in the event loop. It is started from the loop's own
thread, since bubblewrap and the supervisor die with the thread that started them, which is what clears up after a killed pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ray.sandboxes import processes
from forge_ray.sandboxes.log_pipe import LogPipe
from forge_ray.sandboxes.sandbox import Isolation, Limit, SandboxError

_GRACE_S = 20.0
"""How long the dead may take to be gone."""
_CENSUS_S = 1.0
"""Between two looks at the number of processes."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int | None
    killed_by: Limit | None
    seconds: float
    cpu_seconds: float


class Running:
    """One command that runs. `isolation` says what its outermost process is: bubblewrap, or our supervisor."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], directory: Path, log: LogPipe, isolation: Isolation, stdin: int
    ) -> None:
        self._directory, self._log, self._isolation = directory, log, isolation
        self._began = time.monotonic()
        self._status_read, status_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pidfd = -1
        try:
            os.set_blocking(status_write, True)
            # stdout is the status pipe until the command proper starts, stderr the log.
            self._process = subprocess.Popen(
                argv, stdin=stdin, stdout=status_write, stderr=log.write_end, env=dict(env), cwd=directory, start_new_session=True
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            os.close(self._status_read)
            raise SandboxError(f"{argv[0]} cannot be started: {error}") from error
        finally:
            os.close(status_write)
            log.started()
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._stopped: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._pidfd, self._notice)

    def _notice(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def stop(self) -> None:
        """Kill it now; `wait` then raises `SandboxError`."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def wait(self, deadline_s: float, max_processes: int | None) -> Ended:
        """Wait for the end, enforce it at the deadline or when there are too many processes. Cancelling kills. Raises `SandboxError`."""
        status, exit_code, cpu_seconds = b"", 0, 0.0
        try:
            killed_by = await self._watch(deadline_s, max_processes)
        finally:
            try:
                if not self._ended.done():
                    await uncancelled(self._kill())
            finally:
                asyncio.get_running_loop().remove_reader(self._pidfd)
                os.close(self._pidfd)
                self._log.close()
                status = self._read_status()
                if self._ended.done():
                    exit_code, cpu_seconds = self._reap()
                if self._isolation == "none" and b"end" not in status:
                    # The supervisor itself was killed: what it watched over may be anywhere now.
                    await uncancelled(self._sweep())
        seconds = time.monotonic() - self._began
        if self._stopped.done():
            raise SandboxError("the sandbox was destroyed while a command ran in it")
        if b"ready" not in status and killed_by is None:
            last = " ".join(self._log.tail(400).decode(errors="replace").split())
            raise SandboxError(f"the sandbox could not be set up (exit code {exit_code}): {last}")
        return Ended(None if killed_by else exit_code, killed_by, seconds, cpu_seconds)

    async def _watch(self, deadline_s: float, max_processes: int | None) -> Limit | None:
        end = self._began + deadline_s
        while not self._ended.done() and not self._stopped.done():
            left = end - time.monotonic()
            if left <= 0:
                return "time"
            await asyncio.wait(
                [self._ended, self._stopped],
                timeout=left if max_processes is None else min(left, _CENSUS_S),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if max_processes is not None and not self._ended.done() and self._population() > max_processes:
                return "processes"
        return None

    def _population(self) -> int:
        if self._isolation == "none":
            return len(processes.descendants(self._process.pid))
        init = processes.only_child(self._process.pid)
        namespace = processes.pid_namespace(init) if init else None
        return processes.population(namespace) if namespace else 0

    async def _kill(self) -> None:
        """Kill the whole family and wait until it is gone."""
        if self._isolation == "bubblewrap":
            await self._kill_table()
        else:
            self._send(self._process.pid, signal.SIGTERM)
            self._send(self._process.pid, signal.SIGCONT)
        await asyncio.wait([self._ended], timeout=_GRACE_S)
        if not self._ended.done():
            self._send(self._process.pid, signal.SIGKILL)
            await asyncio.wait([self._ended], timeout=_GRACE_S)
        if not self._ended.done():
            raise SandboxError(f"process {self._process.pid} of {self._directory} survives SIGKILL")

    async def _kill_table(self) -> None:
        """Kill the init of bubblewrap's process table, with which the kernel ends every process of that table, and then bubblewrap.

        Bubblewrap is held still meanwhile: if it was killed just after it has made its init, and before that depends on it, the init would
        be left behind for ever.
        """
        self._send(self._process.pid, signal.SIGSTOP)
        await self._until(self._process.pid, "TtZX")
        if (init := processes.only_child(self._process.pid)) is not None:
            self._send(init, signal.SIGKILL)
            await self._until(init, "ZX")
        self._send(self._process.pid, signal.SIGKILL)

    @staticmethod
    async def _until(pid: int, states: str) -> None:
        """Wait until `pid` is in one of `states`, or gone; no longer than the dead may take."""
        end = time.monotonic() + _GRACE_S
        while (state := processes.state(pid)) is not None and state not in states and time.monotonic() < end:
            await asyncio.sleep(0.001)

    async def _sweep(self) -> None:
        if survivors := await asyncio.to_thread(processes.kill_marked, self._directory):
            raise SandboxError(f"processes {survivors} of {self._directory} survive SIGKILL")

    @staticmethod
    def _send(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _read_status(self) -> bytes:
        try:
            return os.read(self._status_read, 4096)
        except BlockingIOError:
            return b""
        finally:
            os.close(self._status_read)

    def _reap(self) -> tuple[int, float]:
        try:
            _, status, usage = os.wait4(self._process.pid, 0)
        except ChildProcessError:
            raise SandboxError(f"somebody else waited for process {self._process.pid}: its end is unknown") from None
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code  # so that the object does not wait itself
        return (128 - code if code < 0 else code), usage.ru_utime + usage.ru_stime


async def uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end even when we are cancelled meanwhile, then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
