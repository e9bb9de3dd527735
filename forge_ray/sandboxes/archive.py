"""The workspace as a file that is named by its content: a deterministic tar, gzipped, stored once per digest.

Entries are sorted by their bytes; times, owners and hard links are left out; permission bits, links (as links) and FIFOs (never
opened) are kept; sockets and devices are left out, and so is what lies deeper than `MAX_DEPTH`. Names are bytes and come back as
they were. Files and folders that their owner may not read are read all the same and keep their mode. No process that could change
the workspace may be alive.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from forge_ray.sandboxes.sandbox import SandboxError

MAX_BYTES = 1 << 30
"""Largest sum of file sizes."""
MAX_DEPTH = 100


class _Hashed:
    """What tarfile writes to: gzip and digest at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._gzip = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6)
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._gzip.write(data)

    def close(self) -> None:
        self._gzip.close()


def archive_tree(tree: Path, directory: Path) -> str:
    """Store `tree` as `<directory>/<digest>.tar.gz` unless it is there; returns the digest, sha256 of the tar stream in hex. Blocks.

    A file appears under its name only when it is whole and on disk. Raises `SandboxError`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                hashed = _Hashed(file)
                sink: Any = hashed  # all that a stream needs is write()
                with tarfile.open(fileobj=sink, mode="w|", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
                    root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        _Writer(tar).folder(root, "", 0)
                    finally:
                        os.close(root)
                hashed.close()
                digest = hashed.digest.hexdigest()
                target = directory / f"{digest}.tar.gz"
                if not target.exists():
                    file.flush()
                    os.fdatasync(file.fileno())
                    os.chmod(temporary, 0o644)
                    os.rename(temporary, target)
            return digest
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except (OSError, tarfile.TarError) as error:
        raise SandboxError(f"the workspace cannot be archived: {error}") from error


class _Writer:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self.tar, self.bytes = tar, 0

    def folder(self, folder: int, prefix: str, depth: int) -> None:
        with os.scandir(folder) as entries:
            names = sorted((entry.name for entry in entries), key=os.fsencode)
        for name in names:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            info = tarfile.TarInfo(f"{prefix}{name}")
            info.mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISREG(status.st_mode):
                info.size = status.st_size
                self.bytes += info.size
                if self.bytes > MAX_BYTES:
                    raise SandboxError(f"the workspace holds more than {MAX_BYTES >> 20} MiB and is not archived")
                with _opened(name, folder, info.mode, 0o400, 0) as handle, open(handle, "rb", closefd=False) as file:
                    self.tar.addfile(info, file)
            elif stat.S_ISDIR(status.st_mode):
                info.type = tarfile.DIRTYPE
                self.tar.addfile(info)
                if depth < MAX_DEPTH:
                    with _opened(name, folder, info.mode, 0o500, os.O_DIRECTORY) as handle:
                        self.folder(handle, f"{prefix}{name}/", depth + 1)
            elif stat.S_ISLNK(status.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
                self.tar.addfile(info)
            elif stat.S_ISFIFO(status.st_mode):
                info.type = tarfile.FIFOTYPE
                self.tar.addfile(info)


@contextlib.contextmanager
def _opened(name: str, folder: int, mode: int, needed: int, flags: int) -> Iterator[int]:
    """A descriptor of `name`; where its mode forbids us that, the mode is changed for the moment."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    changed = False
    try:
        handle = os.open(name, flags, dir_fd=folder)
        if flags & os.O_DIRECTORY and mode & needed != needed and os.geteuid() != 0:
            os.fchmod(handle, mode | needed)  # readable, but what is in it could not be looked at
            changed = True
    except PermissionError:
        os.chmod(name, mode | needed, dir_fd=folder)  # no link: it was looked at a moment ago and nobody else is here
        changed = True
        handle = os.open(name, flags, dir_fd=folder)
    try:
        yield handle
    finally:
        if changed:
            os.fchmod(handle, mode)
        os.close(handle)
