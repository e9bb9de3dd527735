"""Reading and writing single files in a tree that may hold planted links: no path component is ever followed through one."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def _parts(path: str) -> tuple[str, ...]:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError(f"{path!r} is no path below the directory")
    return parts


@contextlib.contextmanager
def _folder(root: Path, names: tuple[str, ...], *, make: bool) -> Iterator[int]:
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=handle)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def write_below(root: Path, path: str, content: bytes, mode: int) -> None:
    """Make `root/path` a new regular file; what had that name before (a link, a FIFO) is replaced. Raises `OSError`, `ValueError`."""
    *folders, name = _parts(path)
    with _folder(root, tuple(folders), make=True) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)


def read_below(root: Path, path: str, limit: int) -> bytes:
    """At most `limit` bytes of the regular file `root/path`. Raises `FileNotFoundError` where there is none without a link on the way."""
    *folders, name = _parts(path)
    try:
        with _folder(root, tuple(folders), make=False) as folder:
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise FileNotFoundError(f"{path}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FileNotFoundError(f"{path} is no regular file")
        with open(handle, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(handle)
