"""Who owns a sandbox directory: the process that made it, named so that a later life of the run can tell whether it is gone.

A process is named by its number and start time, inside one process table and one boot of one host. Sandboxes on a shared disk that
belong to another host are left to that host.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from forge_ray.sandboxes import processes

FILE = "owner.json"
_UNOWNED_S = 60.0
"""A directory without a readable owner is being made; after so many seconds its maker died on the way."""


@functools.cache
def _place() -> dict[str, str | None]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "table": processes.pid_namespace(os.getpid())}


def sign(directory: Path, run: str, rollout: str) -> None:
    """Write down that this process owns `directory`."""
    pid = os.getpid()
    text = json.dumps({"run": run, "rollout": rollout, "pid": pid, "start": processes.start_time(pid), **_place()})
    (directory / FILE).write_text(text)


def abandoned(directory: Path) -> bool:
    """Whether the owner of `directory` is gone, as far as can be told from here."""
    try:
        owner: dict[str, Any] = json.loads((directory / FILE).read_text())
        number, start, place = owner["pid"], owner["start"], {key: owner[key] for key in _place()}
    except (OSError, ValueError, KeyError, TypeError):
        try:
            return time.time() - directory.lstat().st_mtime > _UNOWNED_S
        except OSError:
            return False
    if place["host"] != _place()["host"]:
        return False
    # Same host, another boot or another process table: a machine or container that was started again.
    return place != _place() or processes.start_time(number) != start
