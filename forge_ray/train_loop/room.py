"""A disk without room, told as what it is.

torch, safetensors and the operating system each have words of their own for it, some of which name no disk. It is nobody's bug and no
restart helps, so it ends the run at once, in one line, and what is on disk already stays in force.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge_ray.errors import ForgeRayError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
LITTLE = 2**20
"""Bytes: with less free, whatever failed to be written failed for want of room."""


class DiskFull(ForgeRayError):
    """Something of the learner's could not be written for want of room."""


@contextmanager
def needed(what: str, directory: Path) -> Iterator[None]:
    """Raises `DiskFull`, which names `what`, for an error inside the block that a full disk below `directory` explains."""
    try:
        yield
    except ForgeRayError:
        raise
    except Exception as error:  # each library has its own for it
        free = _free(directory)
        if getattr(error, "errno", None) not in NO_ROOM and free >= LITTLE:
            raise
        raise DiskFull(
            f"{what} cannot be written: {directory} has no room ({free / 2**20:.0f} MiB free). Make some, then go on with --resume"
        ) from error


def _free(directory: Path) -> int:
    """Bytes that this user may still write there."""
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
