"""Removal of a directory tree that somebody hostile has left, as root or as an ordinary user.

Read-only and unreadable directories are opened up first, links are removed and never followed, nothing is opened (a FIFO would
block), and depth is no matter: a directory's folders are moved up beside it before it is removed, so that no path grows beyond two
names and nothing recurses. No process that could change the tree may be alive.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from forge_ray.sandboxes.sandbox import SandboxError


def remove_tree(path: Path) -> None:
    """Remove `path`, whatever it is; nothing happens when it is not there. Raises `SandboxError` that names what could not be removed."""
    try:
        _remove(os.fsencode(path))
    except FileNotFoundError:
        if os.path.lexists(path):
            raise SandboxError(f"{path} changes while it is removed: a process is still alive in it") from None
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename is not None else path
        raise SandboxError(f"{where} cannot be removed: {error.strerror}") from error


def _remove(root: bytes) -> None:
    if not os.path.isdir(root) or os.path.islink(root):
        os.unlink(root)
        return
    prefix, moved = secrets.token_hex(8).encode(), 0  # a name that nobody could have planted
    os.chmod(root, 0o700)
    while entries := list(os.scandir(root)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for below in list(os.scandir(entry.path)):
                if below.is_dir(follow_symlinks=False):
                    os.chmod(below.path, 0o700)  # moving a directory writes to it: its parent changes
                    os.rename(below.path, b"%s/%s.%d" % (root, prefix, moved))
                    moved += 1
                else:
                    os.unlink(below.path)
            os.rmdir(entry.path)
    os.rmdir(root)
