"""Runs one program in a home and a workspace of its own, and ends it with everything that it started.

No sandbox: the suite tests proxies and trusts the programs it was asked to run. The directories must not lie below the system's temporary
directory, where some programs behave otherwise.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forge_ray.harnesses.harness import Command
from forge_ray.harnesses.install.package import cache_directory

LOG_END = 20_000
"""Bytes of a program's output that are kept."""


@dataclass(frozen=True)
class Ended:
    """How a run of a program ended."""

    exit_code: int | None
    """None: it was ended at the deadline."""
    log: str
    """The end of its output."""
    seconds: float


def directory() -> Path:
    """A new directory for runs, not below the system's temporary one; whoever asks removes it."""
    parent = cache_directory().parent
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="conformance-", dir=parent))


def environment(home: Path, scratch: Path) -> dict[str, str]:
    """What a program finds in its environment beside its adapter's own variables: no proxies, no keys, no settings of this user."""
    kept = {name: os.environ[name] for name in ("PATH", "USER", "LOGNAME") if name in os.environ}
    return {**kept, "HOME": str(home), "TMPDIR": str(scratch), "LANG": "C.UTF-8", "SHELL": "/bin/bash", "TERM": "dumb"}


def lay_out(command: Command, home: Path, workspace: Path) -> None:
    """Write the files that the command asks for."""
    for root, files in ((home, command.home_files), (workspace, command.workspace_files)):
        for name, text in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


async def run(command: Command, home: Path, workspace: Path, log: Path, deadline_s: float) -> Ended:
    """Run the program to its end or the deadline (seconds). `log` gets all of its output."""
    scratch = home.parent / "tmp"
    for directory in (home, workspace, scratch):
        directory.mkdir(parents=True, exist_ok=True)
    lay_out(command, home, workspace)
    began = asyncio.get_running_loop().time()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            cwd=workspace,
            env={**environment(home, scratch), **command.env},
            stdin=asyncio.subprocess.DEVNULL if command.stdin is None else asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            given = command.stdin.encode() if command.stdin is not None else None
            await asyncio.wait_for(process.communicate(given), deadline_s)
            code = process.returncode
        except TimeoutError:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    text = log.read_bytes()[-LOG_END:].decode(errors="replace")
    return Ended(code, text, asyncio.get_running_loop().time() - began)
