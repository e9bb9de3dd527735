"""The small interface of a sandbox: where one rollout's harness and verifier run.

A `SandboxBackend` makes sandboxes for one run and finds what an earlier life of that run left behind. A `Sandbox` belongs to one rollout:

    async with await backend.create(task, rollout="g00012-3.0", logs=run_dir.rollouts / "g00012-3.0") as sandbox:
        await sandbox.put({".config/agent.toml": text}, to="home")
        result = await sandbox.run(argv, env=env, deadline_s=600)       # the harness
        digest = await sandbox.archive(archive_directory)
        rewards = await sandbox.verify(timeout_s=60)                    # raises tasks.verifier.VerifierError

Invariants, whatever the backend: when `run` returns, or raises, no process that it started is alive; the files of the task's `tests/`
are not in the sandbox before `verify`, and what the harness put where the verifier reads or writes is gone by then; `destroy` leaves no
file and no process, and may be called twice. Nothing here blocks the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from forge_ray.errors import ForgeRayError
from forge_ray.tasks.task import Task
from forge_ray.tasks.verifier import Rewards

Isolation = Literal["bubblewrap", "none"]
"""`bubblewrap`: a file system and process table of its own. `none`: the host's, with limits and a process tree that is killed whole."""

Limit = Literal["time", "memory", "cpu", "file", "processes"]


class SandboxError(ForgeRayError):
    """The sandbox could not do what was asked, and neither the harness nor the task is to blame. One line."""


@dataclass(frozen=True)
class RunResult:
    """How one command ended."""

    exit_code: int | None
    """The shell's: 128 + n for signal n. None when the sandbox killed it (`limit` says why)."""
    limit: Limit | None
    """The limit that ended it, or None. `time` and `processes` are certain. The others are per process and known by their signs:
    `cpu` and `file` by the signal, `memory` by a SIGKILL while the kernel ran out of it, or by the program's own last words."""
    seconds: float
    """Wall-clock seconds."""
    cpu_seconds: float
    """CPU seconds of the command and of those of its children that were waited for, the sandbox's own included."""
    log: Path
    """stdout and stderr together, bounded: the middle of a long one is left out."""
    log_bytes: int
    """Bytes that the command wrote, kept or not."""
    detail: str
    """One line for a person: the limit with its value and the real seconds, or the exit code."""

    @property
    def signal(self) -> int | None:
        """The signal that the command died of, as its exit code tells; None where it ended by itself or was killed by us."""
        return self.exit_code - 128 if self.exit_code is not None and 128 < self.exit_code <= 192 else None

    @property
    def timed_out(self) -> bool:
        return self.limit == "time"


@dataclass(frozen=True)
class Leftover:
    """A sandbox whose owner is gone: its directory, and perhaps processes."""

    run: str
    rollout: str
    directory: Path


class Sandbox(Protocol):
    """One rollout's sandbox."""

    rollout: str
    isolation: Isolation
    workspace: str
    """Path of the workspace as the harness meets it."""
    home: str
    """Path of HOME as the harness meets it."""

    async def put(self, files: Mapping[str, str | bytes], *, to: Literal["home", "workspace"] = "home", mode: int = 0o644) -> None:
        """Write files (path relative to `to` -> content), making folders. Never through a link that was planted there."""
        ...

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
        """Run `argv` until it ends or `deadline_s` seconds have passed, then kill all that is left of it.

        `env` comes on top of the sandbox's own variables, `cwd` is the workspace by default, `stdin` is text (default: empty), `visible`
        names host paths that must be readable at the same place, and the output goes to `<logs>/<log>.log`. Cancelling the call kills the
        command.
        """
        ...

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes of a regular file, relative to the workspace or absolute below the workspace or HOME; no link is followed.

        Raises `FileNotFoundError` where there is no such regular file.
        """
        ...

    def log_text(self, log: str = "harness") -> str:
        """A log as text, what is not UTF-8 replaced; empty when there is none."""
        ...

    async def archive(self, directory: Path) -> str:
        """Store the workspace as `<directory>/<digest>.tar.gz`, once per digest.

        Returns the digest: sha256 of the tar stream before compression, in hex.
        """
        ...

    async def restore(self, archive: Path) -> None:
        """Put the workspace of an `archive` that a sandbox has stored in the place of this one's, whatever that holds."""
        ...

    async def verify(self, *, timeout_s: float) -> Rewards:
        """Run the task's `tests/test.sh` on the workspace and read the rewards.

        Raises `VerifierError`; its log is `<logs>/verifier.log`.
        """
        ...

    async def destroy(self) -> None:
        """Kill what runs and remove every file. Raises `SandboxError` where something stays."""
        ...

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


class SandboxBackend(Protocol):
    """Makes the sandboxes of one run."""

    name: str
    """As in the config: `process`."""
    isolation: Isolation

    def unsupported(self, task: Task) -> list[str]:
        """What the task asks for and this backend, as it works on this machine, cannot give; one line each."""
        ...

    async def create(self, task: Task, rollout: str, logs: Path) -> Sandbox:
        """A sandbox with the task's files in its workspace. What an earlier life left under the same rollout id is destroyed first.

        Raises `UserError` for a task that is not supported, `SandboxError` for everything else.
        """
        ...

    async def leftovers(self) -> list[Leftover]:
        """Sandboxes of this run on this machine whose owner process is gone. Those of other living pools are not among them."""
        ...

    async def destroy_leftover(self, leftover: Leftover) -> None:
        """Kill its processes and remove its files."""
        ...
