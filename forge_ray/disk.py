"""What is on disk, and not only in the kernel's memory."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """The content of a file, or the names in a directory, outlast a crash of the machine once this returns. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
