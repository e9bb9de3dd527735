"""The process sandbox: a rollout is a tree of processes on this host, in a directory of its own, isolated by bubblewrap where that works.

    <directory>/<run>/<rollout>/{owner.json, workspace/, home/, tmp/, shm/, verifier/{tests/, logs/, home/, tmp/, shm/}}

With bubblewrap every rollout meets the same paths (`/workspace` or the task's working directory, `/home/agent`, `/tests`,
`/logs/verifier`) and nothing else of the host but its system, read-only. Without it the paths are those of the directory, a test
script finds its own in `TESTS_DIR` and `VERIFIER_DIR` (so `${TESTS_DIR:-/tests}` is right in both), and the harness can read and
signal whatever our user can.

Not enforced here: disk space in all (`file_mb` bounds single files), CPU shares, and the network, which is the host's.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from forge_ray.config import Sandbox as SandboxConfig
from forge_ray.errors import UserError
from forge_ray.sandboxes import bubblewrap, owner, processes, supervisor
from forge_ray.sandboxes.archive import archive_tree, restore_tree
from forge_ray.sandboxes.files import read_below, write_below
from forge_ray.sandboxes.limits import Limits, oom_kills
from forge_ray.sandboxes.log_pipe import LogPipe
from forge_ray.sandboxes.removal import remove_tree
from forge_ray.sandboxes.running import Ended, Running, uncancelled
from forge_ray.sandboxes.sandbox import Isolation, Leftover, RunResult, SandboxError
from forge_ray.tasks.copying import copy_tests
from forge_ray.tasks.image import PATH, lay_out
from forge_ray.tasks.task import TESTS_DIR, VERIFIER_DIR, Task
from forge_ray.tasks.verifier import RewardMissing, Rewards, VerifierKilled, VerifierTimeout, parse_rewards

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LOG_END = 4096
"""Bytes of a log's end that are looked at for the signs of a limit."""


class ProcessBackend:
    """Makes process sandboxes for one run."""

    name = "process"

    def __init__(self, config: SandboxConfig, run: str) -> None:
        """Raises `UserError` where `sandbox.isolation: bubblewrap` is asked for and does not work, or the directory cannot be used."""
        self.config, self.run = config, _named(run)
        self.isolation: Isolation
        self.isolation, self.reason = _isolation(config)
        parent = Path(config.directory) if config.directory else Path(tempfile.gettempdir(), f"forge-ray-{os.geteuid()}")
        self.directory = _private(parent) / self.run

    def unsupported(self, task: Task) -> list[str]:
        return task.unsupported(self.name, self.isolation)

    async def create(self, task: Task, rollout: str, logs: Path) -> ProcessSandbox:
        if problems := self.unsupported(task):
            raise UserError(f"not supported by the process sandbox: {'; '.join(problems)}", where=str(task.directory))
        making = asyncio.ensure_future(asyncio.to_thread(self._create, task, _named(rollout), logs))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await uncancelled(_unmake(making))
            raise

    def _create(self, task: Task, rollout: str, logs: Path) -> ProcessSandbox:
        directory = self.directory / rollout
        try:
            if os.path.lexists(directory):
                if not owner.abandoned(directory):
                    raise SandboxError(f"{directory} is in use")
                _clear_abandoned(directory)
            self._make(directory)
            try:
                owner.sign(directory, self.run, rollout)
                logs.mkdir(parents=True, exist_ok=True)
                for name in ("workspace", "home", "tmp", "shm"):
                    (directory / name).mkdir(mode=0o755)
                lay_out(task.image, directory / "workspace")
            except BaseException:
                _remove(directory)
                raise
        except OSError as error:
            raise SandboxError(f"{directory} cannot be made: {error}") from error
        return ProcessSandbox(self.config, self.isolation, task, rollout, directory, logs)

    def _make(self, directory: Path) -> None:
        # The last sandbox of another pool takes the parent with it, at any moment: also between the two looks that `exist_ok` would take.
        while True:
            with contextlib.suppress(FileExistsError):
                directory.parent.mkdir(mode=0o700, parents=True)
            try:
                return directory.mkdir(mode=0o700)
            except FileNotFoundError:
                if directory.parent.is_symlink():
                    raise

    async def leftovers(self) -> list[Leftover]:
        return await asyncio.to_thread(self._leftovers)

    def _leftovers(self) -> list[Leftover]:
        try:
            directories = sorted(self.directory.iterdir())
        except FileNotFoundError:
            return []
        return [Leftover(self.run, directory.name, directory) for directory in directories if owner.abandoned(directory)]

    async def destroy_leftover(self, leftover: Leftover) -> None:
        await asyncio.to_thread(_clear_abandoned, leftover.directory)


async def _unmake(making: asyncio.Future[ProcessSandbox]) -> None:
    """Remove what a thread still makes that nobody waits for any more."""
    await asyncio.wait({making})
    if making.exception() is None:
        await making.result().destroy()


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not safe as a file name")
    return name


def _isolation(config: SandboxConfig) -> tuple[Isolation, str]:
    """What isolation there is, and why no better one."""
    if config.isolation == "none":
        return "none", "sandbox.isolation is none"
    try:
        bubblewrap.probe()
    except bubblewrap.Unavailable as error:
        if config.isolation == "bubblewrap":
            fix = "install it (apt-get install bubblewrap), or say isolation: auto"
            raise UserError(str(error), where="sandbox.isolation", fix=fix) from None
        return "none", str(error)
    return "bubblewrap", ""


def _private(parent: Path) -> Path:
    """Make `parent` and make sure that it is ours: in a shared temporary directory somebody else may have made one of that name."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = parent.lstat()
    except OSError as error:
        raise UserError(f"cannot be made ({error.strerror})", where=f"sandbox.directory {parent}", fix="name another directory") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UserError("is not a directory of this user", where=f"sandbox.directory {parent}", fix="name another directory") from None
    return parent.resolve()


def _clear(directory: Path) -> None:
    """Kill what lives in a sandbox directory and remove it."""
    _kill_in(directory)
    _remove(directory)


def _clear_abandoned(directory: Path) -> None:
    """`_clear` for a sandbox whose owner is gone. Several pools may find the same one, and a new one may be made in its place meanwhile:
    the first takes it away under another name, and the others leave what they find alone."""
    try:
        parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(parent, fcntl.LOCK_EX)
        if not owner.abandoned(directory):
            return
        _kill_in(directory)
        taken = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}")
        try:
            os.rename(directory, taken)
        except OSError as error:
            raise SandboxError(f"{directory} cannot be removed: {error.strerror}") from error
    finally:
        os.close(parent)
    _remove(taken)


def _kill_in(directory: Path) -> None:
    if survivors := processes.kill_marked(directory):
        raise SandboxError(f"processes {survivors} of {directory} survive SIGKILL")


class ProcessSandbox:
    """One rollout's process sandbox; see `sandbox.Sandbox` for what the methods promise."""

    def __init__(self, config: SandboxConfig, isolation: Isolation, task: Task, rollout: str, directory: Path, logs: Path) -> None:
        self.rollout, self.directory, self.logs = rollout, directory, logs
        self.isolation: Isolation = isolation
        self._task, self._log_bytes = task, config.log_bytes
        self._limits = Limits.of(config, task.memory_mb)
        self._workspace = directory / "workspace"
        bare = isolation == "none"
        self.workspace = str(self._workspace) if bare else task.workdir
        self.home = str(directory / "home") if bare else bubblewrap.HOME
        self._running: Running | None = None
        self._lock = asyncio.Lock()
        """One command, archive or removal at a time."""

    async def put(self, files: Mapping[str, str | bytes], *, to: Literal["home", "workspace"] = "home", mode: int = 0o644) -> None:
        for path, content in files.items():
            try:
                write_below(self.directory / to, path, content.encode() if isinstance(content, str) else content, mode)
            except OSError as error:
                raise SandboxError(f"{path} cannot be written to {to}: {error.strerror}") from error

    async def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | None = None,
        visible: Sequence[str] = (),
        log: str = "harness",
    ) -> RunResult:
        async with self._lock:
            binds = {str(self.directory / "tmp"): "/tmp", str(self.directory / "home"): self.home}
            binds[str(self._workspace)] = self.workspace  # last: it may lie below /tmp
            variables = {**self._variables(self.directory), **self._task.env, **(env or {})}
            return await self._run(argv, variables, binds, self.directory / "shm", cwd or self.workspace, stdin, visible, log, deadline_s)

    async def _run(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        binds: Mapping[str, str],
        shm: Path,
        cwd: str,
        stdin: str | None,
        visible: Sequence[str],
        log: str,
        deadline_s: float,
    ) -> RunResult:
        if missing := [path for path in visible if not os.path.exists(path)]:
            raise SandboxError(f"{', '.join(missing)} is to be visible and does not exist")
        try:
            pipe = LogPipe(self.logs / f"{_named(log)}.log", self._log_bytes)
        except OSError as error:
            raise SandboxError(f"the log cannot be written: {error}") from error
        try:
            if self.isolation == "bubblewrap":
                # The task's tests and solution, and the run with its secret and the other rollouts (`<run>/rollouts/<id>` is where we log).
                hidden = (str(self._task.directory), str(self.logs.parent.parent))
                options = bubblewrap.arguments(binds, shm=str(shm), cwd=cwd, visible=visible, hidden=hidden)
                script = self._limits.shell(count_processes=bubblewrap.counts_processes())
                # The shell is the init of the process table: it waits for orphans too, and its end ends all.
                shell = ("/bin/sh", "-c", f'{script} && echo ready && exec >&2 || exit 126; "$@"; exit $?', "sh")
                command = [*bubblewrap.probe(), *options, *shell, *argv]
            else:
                command = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), self._limits.supervisor(), cwd, *argv]
            kills = oom_kills()
            with _input(stdin) as handle:
                self._running = Running(command, variables, self.directory, pipe, self.isolation, handle)
            ended = await self._running.wait(deadline_s, self._limits.processes)
        finally:
            self._running = None
            pipe.close()
        return self._result(ended, pipe, deadline_s, oom_killed=oom_kills() > kills)

    def _result(self, ended: Ended, pipe: LogPipe, deadline_s: float, *, oom_killed: bool) -> RunResult:
        limit, code, limits = ended.killed_by, ended.exit_code, self._limits
        if limit is None and code is not None:
            limit = limits.recognise(code, pipe.tail(_LOG_END), oom_killed=oom_killed, cpu_seconds=ended.cpu_seconds)
        detail = {
            None: f"{_ended_by(code)} after {ended.seconds:.1f} s",
            "time": f"killed after {ended.seconds:.1f} s, its limit is {deadline_s:g} s",
            "memory": f"out of memory{f' (limit {limits.memory_mb} MB a process)' if limits.memory_mb else ''}, exit code {code}",
            "cpu": f"more than {limits.cpu_seconds} s of CPU time in one process",
            "file": f"a file larger than {limits.file_mb} MB",
            "processes": f"killed with more than {limits.processes} processes",
        }[limit]
        return RunResult(code, limit, ended.seconds, ended.cpu_seconds, pipe.path, pipe.total, detail)

    def _variables(self, base: Path) -> dict[str, str]:
        """The variables that every command starts with. HOME and TMPDIR are below `base` where paths are the host's."""
        bare = self.isolation == "none"
        path = os.pathsep.join((PATH, *(f"{prefix}/bin" for prefix in bubblewrap.interpreter())))
        return {
            "PATH": path,
            "HOME": str(base / "home") if bare else bubblewrap.HOME,
            "TMPDIR": str(base / "tmp") if bare else "/tmp",
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "WORKSPACE": self.workspace,
            processes.MARKER: str(self.directory),
        }

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        for place, root in ((self.workspace, self._workspace), (self.home, self.directory / "home")):
            if path.startswith(f"{place}/"):
                return read_below(root, path[len(place) + 1 :], limit)
        return read_below(self._workspace, path, limit)

    def log_text(self, log: str = "harness") -> str:
        try:
            return (self.logs / f"{_named(log)}.log").read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return ""

    async def archive(self, directory: Path) -> str:
        async with self._lock:
            return await asyncio.to_thread(self._archive, directory)

    def _archive(self, directory: Path) -> str:
        self._open_workspace()
        return archive_tree(self._workspace, directory)

    async def restore(self, archive: Path) -> None:
        async with self._lock:
            await asyncio.to_thread(self._restore, archive)

    def _restore(self, archive: Path) -> None:
        remove_tree(self._workspace)
        try:
            self._workspace.mkdir(mode=0o755)
        except OSError as error:
            raise SandboxError(f"the workspace cannot be made: {error}") from error
        restore_tree(archive, self._workspace)

    def _open_workspace(self) -> None:
        """Make the workspace itself usable again where the harness has closed it; what is in it stays as it was left."""
        try:
            if not stat.S_ISDIR(self._workspace.lstat().st_mode):
                raise SandboxError("the harness replaced its workspace")
            self._workspace.chmod(0o755)
        except OSError as error:
            raise SandboxError(f"the workspace is lost: {error}") from error

    async def verify(self, *, timeout_s: float) -> Rewards:
        async with self._lock:
            base = await asyncio.to_thread(self._prepare_verifier)
            tests, logs = base / "tests", base / "logs"
            bare = self.isolation == "none"
            places = {"TESTS_DIR": str(tests) if bare else TESTS_DIR, "VERIFIER_DIR": str(logs / "verifier") if bare else VERIFIER_DIR}
            binds = {
                str(base / "tmp"): "/tmp",
                str(base / "home"): bubblewrap.HOME,
                str(self._workspace): self.workspace,
                str(tests): TESTS_DIR,
                str(logs): "/logs",
            }
            variables = {**self._variables(base), **self._task.env, **self._task.verifier_env, **places}
            script = f"{places['TESTS_DIR']}/test.sh"
            result = await self._run([script], variables, binds, base / "shm", self.workspace, None, (), "verifier", timeout_s)
            if result.limit == "time":
                raise VerifierTimeout(f"tests/test.sh was {result.detail}")
            if result.limit is not None or result.signal is not None:
                # What it had written before may be the pessimistic half of its verdict.
                raise VerifierKilled(f"tests/test.sh was ended before its time: {result.detail}")
            try:
                return parse_rewards(logs / "verifier")
            except RewardMissing as error:
                raise RewardMissing(f"{error}; tests/test.sh: {result.detail}") from None

    def _prepare_verifier(self) -> Path:
        """A fresh directory with the task's tests, made when the harness and all it started are gone."""
        base = self.directory / "verifier"
        self._open_workspace()
        try:
            remove_tree(base)
            for name in ("", "home", "tmp", "shm", "logs", "logs/agent", "logs/verifier", "logs/artifacts"):
                (base / name).mkdir(mode=0o755)
            copy_tests(self._task.directory, base / "tests")
        except (OSError, shutil.Error) as error:
            raise SandboxError(f"the verifier's files cannot be laid out: {error}") from error
        return base

    async def destroy(self) -> None:
        if self._running is not None:
            self._running.stop()
        async with self._lock:
            # With a process table of its own nothing is alive after a command.
            await asyncio.to_thread(_clear if self.isolation == "none" else _remove, self.directory)

    async def __aenter__(self) -> ProcessSandbox:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.destroy()


def _ended_by(code: int | None) -> str:
    """A shell's exit code in words, where it stands for the one signal that no program ends itself by."""
    return f"killed by SIGKILL (exit code {code})" if code == 128 + signal.SIGKILL else f"exit code {code}"


def _remove(directory: Path) -> None:
    remove_tree(directory)
    with contextlib.suppress(OSError):  # others are still in it
        directory.parent.rmdir()


@contextlib.contextmanager
def _input(text: str | None):
    """A descriptor to read `text` from, or /dev/null: nobody is there to answer."""
    if text is None:
        with open(os.devnull, "rb") as null:
            yield null.fileno()
        return
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file.fileno()
