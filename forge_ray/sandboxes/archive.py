"""The workspace as a file that is named by its content: a deterministic tar, gzipped, stored once per digest.

Entries are sorted by their bytes; times, owners and hard links are left out; permission bits, links (as links) and FIFOs (never
opened) are kept; sockets and devices are left out, and so is what lies deeper than `MAX_DEPTH`. Names are bytes and come back as
they were. Files and folders that their owner may not read are read all the same and keep their mode. No process that could change
the workspace may be alive.

`restore_tree` gives the workspace back: archived again it has the same digest. What it is given may have been made by somebody hostile,
and a restored link may point anywhere: each entry is made by its parent's descriptor, and no link is ever followed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
import zlib
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


def restore_tree(archive: Path, tree: Path) -> None:
    """Fill the empty directory `tree` with what `archive` holds. Blocks. Raises `SandboxError`."""
    try:
        root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"{tree} cannot be opened: {error.strerror}") from error
    modes: list[tuple[bytes, int]] = []
    try:
        with gzip.open(archive) as stream:
            with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
                for info in tar:
                    _restore(tar, info, root, modes)
            while stream.read(1 << 20):  # to the end: only there is the checksum
                pass
        for name, mode in reversed(modes):  # a folder is closed when everything in it is there
            with _parent(root, name) as (folder, last):
                os.chmod(last, mode, dir_fd=folder)
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise SandboxError(f"{archive} cannot be restored: {error}") from error
    finally:
        os.close(root)


def _restore(tar: tarfile.TarFile, info: tarfile.TarInfo, root: int, modes: list[tuple[bytes, int]]) -> None:
    name, mode = os.fsencode(info.name.rstrip("/")), stat.S_IMODE(info.mode)
    with _parent(root, name) as (folder, last):
        if info.isdir():
            os.mkdir(last, 0o700, dir_fd=folder)
            modes.append((name, mode))
        elif info.issym():
            os.symlink(os.fsencode(info.linkname), last, dir_fd=folder)
        elif info.isfifo():
            os.mkfifo(last, 0o600, dir_fd=folder)
            modes.append((name, mode))
        elif info.isreg():
            handle = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
            with open(handle, "wb") as file:
                content = tar.extractfile(info)
                assert content is not None
                shutil.copyfileobj(content, file, 1 << 20)
                file.flush()
                os.fchmod(file.fileno(), mode)
        else:
            raise ValueError(f"{info.name!r} is of a kind that no workspace archive has")


@contextlib.contextmanager
def _parent(root: int, name: bytes) -> Iterator[tuple[int, bytes]]:
    """A descriptor of the folder that `name` (relative to `root`) is in, and its last part."""
    *folders, last = name.split(b"/")
    if any(part in (b"", b".", b"..") for part in (*folders, last)):
        raise ValueError(f"{os.fsdecode(name)!r} is no path below the workspace")
    handle = os.dup(root)
    try:
        for part in folders:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            os.close(handle)
            handle = below
        yield handle, last
    finally:
        os.close(handle)


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
