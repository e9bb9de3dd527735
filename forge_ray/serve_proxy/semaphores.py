"""Named semaphores of the engine's processes, removed by name once every process has opened them.

vLLM gives its workers a lock, which for spawned processes is a name in /dev/shm. The one that made it removes it when it ends in
order; an engine whose replica is killed, as Ray ends its actors, never does, nor does Python's resource tracker, which is killed with
it. A semaphore without a name goes with the last process that has it open, whatever ends them.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from pathlib import Path

import psutil

_OPEN = re.compile(r" (\d+) +/dev/shm/sem\.")
"""Inode of a semaphore in the map of a process's memory. The name there is not the one to remove: the C library makes it under another."""


def unname(pid: int | None = None) -> list[str]:
    """Remove the names of the semaphores that process `pid` (default: this one) and those below it have open; returns their paths."""
    found: set[str] = set()
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(OSError):
                found.update(_OPEN.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    removed = []
    for path in glob.glob("/dev/shm/sem.mp-*"):  # those of Python's multiprocessing
        with contextlib.suppress(OSError):
            if str(os.stat(path).st_ino) in found:
                os.unlink(path)
                removed.append(path)
    return sorted(removed)
