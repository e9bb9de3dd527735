"""A task's digest, as Harbor counts it: the same directory has the same digest here, in its lock files and in its registry. And, counted
the same way, the digest of what its sandbox is built from.

sha256 over `<relative path> NUL <sha256 of the file> LF` of each file that belongs to a task (`FILES`, `FOLDERS`), sorted by path, without
what the task's `.gitignore` leaves out (`IGNORED`, where it has none). A link to a file counts as the file; one to a directory is not
followed. `.harborignore` is not read.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
FOLDERS = ("environment", "tests", "solution", "steps")
IGNORED = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")

_known: dict[tuple[str, str], tuple[tuple[tuple[str, int, int], ...], str]] = {}
"""Directory and part of it -> what its files looked like, and the digest."""
_TICK_NS = 100_000_000
"""More than a file system's clock stands still: of two changes within that time the second need not show in a file's time."""


def task_digest(directory: Path) -> str:
    """`sha256:<hex>` of the task in `directory`. Raises `OSError`. Files are read again only where one's size or time has changed."""
    return _digest(directory, "")


def image_digest(directory: Path) -> str:
    """`sha256:<hex>` of what the task's image is built from: the Dockerfile and the other files of `environment/`. Raises `OSError`."""
    return _digest(directory, "environment/")


def _digest(directory: Path, part: str) -> str:
    began, found = time.time_ns(), sorted(name for name in _files(directory) if name.startswith(part))
    stamp = tuple((name, (at := (directory / name).stat()).st_size, at.st_mtime_ns) for name in found)
    known = _known.get((str(directory), part))
    if known is not None and known[0] == stamp:
        return known[1]
    whole = hashlib.sha256()
    for name in found:
        with (directory / name).open("rb") as file:
            whole.update(os.fsencode(name) + f"\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    digest = f"sha256:{whole.hexdigest()}"
    if all(changed < began - _TICK_NS for _, _, changed in stamp):
        _known[str(directory), part] = (stamp, digest)
    return digest


def _files(directory: Path) -> Iterator[str]:
    """Paths relative to `directory`."""
    from pathspec import PathSpec

    ignore = directory / ".gitignore"
    rules = PathSpec.from_lines("gitignore", ignore.read_text(errors="replace").splitlines() if ignore.exists() else IGNORED)
    names = [name for name in FILES if (directory / name).exists()]
    for folder in FOLDERS:
        for parent, _, files in os.walk(directory / folder):
            names += [os.path.relpath(os.path.join(parent, name), directory) for name in files]
    yield from (name for name in names if os.path.isfile(directory / name) and not rules.match_file(name))
