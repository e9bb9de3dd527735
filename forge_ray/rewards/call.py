"""Calls a reward function in a process of its own (`forge_ray.rewards.program`), so that it can block no event loop and crash no pool.

The process gets names only: of the function, the run, the rollout and its archive. What was sampled it reads itself. It restores the
workspace into a temporary directory of this call, says that it begins, and has `timeout_s` seconds from then on; the time to load is
bounded apart. What it prints goes to the log. When `score` returns or raises, the process, what it started in its session, and the
directory are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forge_ray.reference import Reference
from forge_ray.sandboxes.log_pipe import LogPipe
from forge_ray.sandboxes.removal import remove_tree
from forge_ray.sandboxes.sandbox import SandboxError
from forge_ray.tasks.verifier import VerifierError, VerifierTimeout

LOAD_S = 300.0
"""Seconds to start Python, read the rollout's calls and restore its workspace."""
ANSWER_BYTES = 1 << 20
"""Longest answer of the process."""


class RewardFunctionFailed(VerifierError):
    """The function is not there, raised, died, or returned no numbers. One line."""


@dataclass(frozen=True)
class Question:
    """What the process is told; plain values."""

    function: str
    """A `Reference`."""
    run: str
    """Run directory."""
    rollout: str
    archive: str | None
    """File of the archived workspace; None: there is none."""
    task: str
    task_directory: str
    harness: str
    outcome: str
    rewards: dict[str, float] = field(default_factory=dict)
    """The verifier's."""


@dataclass(frozen=True)
class Scored:
    """What the function said."""

    rewards: dict[str, float]
    """By name; a plain number has the function's name."""
    calls: dict[str, float]
    """Rewards of single calls, by call id or place; see `RolloutRecord.call_rewards`."""
    digest: str
    """sha256, hex, of the sources that it consists of: every module below its folder that was imported."""


async def score(function: Reference, question: Question, *, timeout_s: float, log: Path, log_bytes: int, within: str | None) -> Scored:
    """Ask `function` about a rollout. `within`: parent of the temporary directory (None: the system's). Raises `VerifierError`."""
    try:
        place = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="forge-ray-reward-", dir=within))
        pipe = LogPipe(log, log_bytes)
    except OSError as error:
        raise SandboxError(f"a reward function cannot be called: {error}") from error
    try:
        answer = await _ask(function, question, place, pipe, timeout_s)
    finally:
        pipe.close()
        await asyncio.shield(asyncio.to_thread(remove_tree, place))
    if answer is None:
        last = [line for line in pipe.tail(4096).decode(errors="replace").splitlines() if line.strip()][-1:] or ["it printed nothing"]
        raise RewardFunctionFailed(f"reward function {function} died: {' '.join(last[0].split())[:300]} (see {log.name})")
    if "error" in answer:
        raise RewardFunctionFailed(f"reward function {function}: {answer['error']} (see {log.name})")
    return Scored(answer["rewards"], answer["calls"], answer["digest"])


async def _ask(function: Reference, question: Question, place: Path, pipe: LogPipe, timeout_s: float) -> dict | None:
    """The process's answer; None where it ended without one."""
    # Our own path: a worker of a cluster has packages of the user's where the driver put them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "forge_ray.rewards.program",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=pipe.write_end,
        cwd=place, env=environment, start_new_session=True, limit=ANSWER_BYTES,
    )  # fmt: skip
    pipe.started()
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps({**asdict(question), "place": str(place), "parent": os.getpid()}).encode())
        process.stdin.close()
        try:
            first = await asyncio.wait_for(_line(process), LOAD_S)
        except TimeoutError:
            raise VerifierTimeout(f"the rollout could not be laid out for reward function {function} within {LOAD_S:g} s") from None
        if first is None or "begin" not in first:
            return first
        try:
            return await asyncio.wait_for(_line(process), timeout_s)
        except TimeoutError:
            raise VerifierTimeout(f"reward function {function} was killed at its limit of {timeout_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())


async def _line(process: asyncio.subprocess.Process) -> dict | None:
    """The next line of the process, or None when it has ended: a child of it may hold the pipe open for longer."""
    assert process.stdout is not None
    reading, ending = asyncio.ensure_future(process.stdout.readline()), asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            await asyncio.wait({reading}, timeout=1)  # what it wrote before its end may still be on the way
        if not reading.done():
            return None
        line = reading.result()
        return json.loads(line) if line.endswith(b"\n") else None
    except ValueError as error:  # longer than the limit
        raise RewardFunctionFailed(f"a reward function's answer cannot be read ({error})") from None
    finally:
        reading.cancel()
        ending.cancel()
