"""What /proc tells about the processes of sandboxes: who carries a marker, who descends from whom, who shares a process table.

Only for processes of our own user (or any, as root): those of others cannot be read and are not ours. A process is killed through a
pidfd after its marker was read again, so a number that the kernel has given to somebody else meanwhile is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path

MARKER = "FORGE_RAY_SANDBOX"
"""Environment variable that every process of a sandbox starts with: `<directory of the sandbox>`."""

_EXEC_TRIES = 1000
_KERNEL_THREAD = 0x00200000


def pids() -> list[int]:
    """Every process that is visible here."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which `pid` started, None when there is no such process. With the number it names a process for ever."""
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return None


def state(pid: int) -> str | None:
    """The kernel's letter for what `pid` does (R, S, D, T: held still, Z: ended and not waited for); None when there is no such process."""
    try:
        return _stat(pid)[0].decode()
    except (OSError, IndexError):
        return None


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/<pid>/stat from the third on (the second may hold spaces and brackets)."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read().rpartition(b")")[2].split()


def descendants(root: int) -> set[int]:
    """All processes below `root`, without it; ended ones that nobody has waited for are left out."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        try:
            fields = _stat(pid)
        except OSError:
            continue
        if fields and fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def only_child(pid: int) -> int | None:
    """The child of a process that has one, such as the init of the process table that bubblewrap made."""
    try:
        names = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:  # gone, or a kernel without that file
        names = [str(child) for child in pids() if _parent(child) == pid]
    return int(names[0]) if names else None


def _parent(pid: int) -> int | None:
    try:
        return int(_stat(pid)[1])
    except (OSError, ValueError, IndexError):
        return None


def pid_namespace(pid: int) -> str | None:
    """Identity of the process table that `pid` lives in; None when it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


_census: tuple[float, Counter[str]] = (-1.0, Counter())


def population(namespace: str, max_age_s: float = 0.5) -> int:
    """Processes in a process table. One scan answers for all tables, so many sandboxes may ask often."""
    global _census
    if time.monotonic() - _census[0] > max_age_s:
        _census = (time.monotonic(), Counter(filter(None, map(pid_namespace, pids()))))
    return _census[1][namespace]


def carries(pid: int, entry: bytes) -> bool:
    """Whether `pid` was started with the environment entry `NAME=value`."""
    try:
        for _ in range(_EXEC_TRIES):
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                content = file.read()
            if content or not _in_exec(pid):
                return entry in content.split(b"\0")
            time.sleep(0.001)
    except OSError:
        pass
    return False


def _in_exec(pid: int) -> bool:
    """Whether `pid` is about to become another program: it has no environment yet, not an empty one."""
    fields = _stat(pid)
    return fields[0] not in b"ZX" and int(fields[48]) == 0 and not int(fields[6]) & _KERNEL_THREAD


def marked(directory: Path) -> list[int]:
    """Processes that started in the sandbox `directory`."""
    entry = f"{MARKER}={directory}".encode()
    return [pid for pid in pids() if pid != os.getpid() and carries(pid, entry)]


def kill_marked(directory: Path, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL all of them until none is left; returns those that survive `timeout_s` seconds of it. Blocks."""
    entry = f"{MARKER}={directory}".encode()
    end = time.monotonic() + timeout_s
    while alive := marked(directory):
        for pid in alive:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    if carries(pid, entry):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        if time.monotonic() > end:
            return marked(directory)
        time.sleep(0.01)
    return []
