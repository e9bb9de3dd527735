"""Copies of a task's own files. Task directories are trusted, their links are not all meant to travel."""

from __future__ import annotations

import os
from pathlib import Path


def copy_file(source: Path, target: Path, mode: int | None = None) -> None:
    """Make `target` a new file with the content of `source` and `mode`, or its permission bits (always readable and writable for us)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # an earlier copy may have put a link there
    target.write_bytes(source.read_bytes())
    target.chmod(mode if mode is not None else (source.stat().st_mode & 0o777) | 0o600)


def copy_tree(source: Path, target: Path, mode: int | None = None) -> None:
    """Copy what is in `source` into the directory `target`. Links stay links; what is neither file, directory nor link is left out."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in sorted(os.scandir(source), key=lambda e: e.name):
        place = target / entry.name
        if entry.is_symlink():
            place.unlink(missing_ok=True)
            os.symlink(os.readlink(entry.path), place)
        elif entry.is_dir():
            copy_tree(Path(entry.path), place, mode)
        elif entry.is_file():
            copy_file(Path(entry.path), place, mode)


def copy_tests(task: Path, target: Path) -> None:
    """Copy the task's `tests/` to the new directory `target`, its `test.sh` executable.

    A link that stays inside `tests/` stays a link; one to elsewhere in the task becomes a copy, since the rest of the task does not
    travel with it.
    """
    source = task / "tests"
    copy_tree(source, target)
    for folder, names, files in os.walk(target):
        for name in (*names, *files):
            place = Path(folder, name)
            original = source / place.relative_to(target)
            if not place.is_symlink() or (not os.path.isabs(os.readlink(place)) and original.resolve().is_relative_to(source.resolve())):
                continue
            place.unlink()
            if original.is_file():
                copy_file(original, place)
            elif original.is_dir():
                copy_tree(original.resolve(), place)
    (target / "test.sh").chmod(0o755)
