"""A file system of a few MiB, which is really full when it is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, mib: int) -> Iterator[Path]:
    """`place`, made and mounted; the test is skipped for a user who may not mount."""
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        reason = f"a file system of its own cannot be mounted here ({mounted.stderr.strip()})"
        pytest.skip(reason)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
