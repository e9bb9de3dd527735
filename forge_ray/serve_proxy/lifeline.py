"""A process that must not outlive another one.

The engine runs in a child process of the replica. When the replica is killed outright nobody tells the child, and a model in memory
would stay behind on the machine. The kernel's own parent-death signal follows the thread that forked, which may end long before its
process; a pidfd follows the process.
"""

from __future__ import annotations

import os
import select
import signal
import threading

OWNER = "FORGE_RAY_REPLICA_PID"
"""Environment variable: the process whose death ends those that inherit it."""


def hold() -> None:
    """Make the current process the owner of every process that it starts from now on."""
    os.environ[OWNER] = str(os.getpid())


def follow() -> bool:
    """In a child of the owner: be killed as soon as the owner is gone. False when this process is the owner, or there is none."""
    owner = int(os.environ.get(OWNER, "0"))
    if owner in (0, os.getpid()):
        return False
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        _end()
        return True
    threading.Thread(target=_watch, args=(handle,), name="lifeline", daemon=True).start()
    return True


def _watch(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
