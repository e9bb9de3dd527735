"""Where a store's files are: a directory, or a path in any pyarrow (or fsspec) file system, by its URI.

    /data/run            a directory
    s3://bucket/path     and gs://, hdfs://, abfs://, …: what `pyarrow.fs.FileSystem.from_uri` knows, query parameters included
    memory://path        else what fsspec knows

A file is put whole: it is written under a name that no reader takes and renamed (in a directory of this machine: synced before). An object
store needs none of that: it shows an object when its upload is complete, and the whole of it is one upload.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from forge_ray.disk import sync
from forge_ray.errors import UserError
from forge_ray.trajectories.store.schema import StoreError

SUFFIX = ".parquet"
OBJECT_STORES = ("s3", "gcs", "abfs")
"""pyarrow's own (`type_name`): an object is there when its upload is complete."""


@dataclass(frozen=True)
class Location:
    """The root of one store."""

    filesystem: fs.FileSystem
    root: str
    """Path in the file system."""
    name: str
    """As a person writes it."""

    @classmethod
    def of(cls, where: str | os.PathLike[str], below: str = "") -> Location:
        """The location that `where` names, or `below` in it. Raises `UserError` for a URI that nothing knows."""
        text = os.fspath(where)
        if "://" not in text:
            path = Path(text).expanduser().absolute() / below
            return cls(fs.LocalFileSystem(), str(path), str(path))
        base, mark, query = text.partition("?")
        uri = f"{base.rstrip('/')}/{below}{mark}{query}" if below else text
        filesystem, root = _open(uri)
        return cls(filesystem, root.rstrip("/"), uri)

    @classmethod
    def of_run(cls, store: str | None, name: str, data: Path) -> Location:
        """Of the run `name`: below the location `store` (`store.location`), or without one its own directory `data`."""
        return cls.of(store, name) if store else cls.of(data)

    @property
    def local(self) -> Path | None:
        """The directory, where it is one of this machine."""
        return Path(self.root) if isinstance(self.filesystem, fs.LocalFileSystem) else None

    def path(self, *parts: str) -> str:
        """The path of something below the root."""
        return posixpath.join(self.root, *parts)

    def files(self, *parts: str) -> list[str]:
        """Paths of all Parquet files below, relative to the root, by name. Raises `StoreError`."""
        everything = fs.FileSelector(self.path(*parts), recursive=True, allow_not_found=True)
        try:
            try:
                infos = self.filesystem.get_file_info(everything)
            except FileNotFoundError:  # Arrow did not find the directory and then did: a writer has just made it
                infos = self.filesystem.get_file_info(everything)
        except OSError as error:
            raise StoreError(f"{self.name} cannot be read: {_line(error)}") from error
        names = [info.path[len(self.root) :].lstrip("/") for info in infos if info.type == fs.FileType.File]
        return sorted(name for name in names if name.endswith(SUFFIX) and not posixpath.basename(name).startswith("."))

    def put(self, name: str, content: pa.Buffer) -> None:
        """Store `content` as the file `name`, whole or not at all, durable when it returns. Raises `StoreError`."""
        try:
            if self.local is not None:
                _put_local(self.local / name, content)
                return
            path = final = self.path(name)
            if renames := self.filesystem.type_name not in OBJECT_STORES:
                path = _unseen(final)
                self.filesystem.create_dir(posixpath.dirname(final), recursive=True)
            with self.filesystem.open_output_stream(path) as stream:
                stream.write(content)
            if (size := self.filesystem.get_file_info(path).size) != content.size:
                raise StoreError(f"{path} has {size} bytes after {content.size} were written")
            if renames:
                self.filesystem.move(path, final)
        except OSError as error:
            raise StoreError(f"{self.path(name)} cannot be written: {_line(error)}") from error

    def probe(self) -> None:
        """Write a small file, and remove it again. Raises `StoreError` where that cannot be done."""
        name = f"probe-{secrets.token_hex(4)}"
        self.put(name, pa.py_buffer(b"forge-ray"))
        try:
            self.filesystem.delete_file(self.path(name))
        except OSError as error:
            raise StoreError(f"{self.path(name)} cannot be removed: {_line(error)}") from error

    def sweep(self) -> None:
        """Remove what a writer that was killed left half-written. Only for the one process that drives the run."""
        if self.local is not None:
            for left in self.local.glob("*/*/.*.tmp"):
                if left.parent.parent.name != "rescores":  # another process may be at it
                    left.unlink(missing_ok=True)


def _put_local(path: Path, content: pa.Buffer) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(_unseen(str(path)))
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    for directory in (path.parent, path.parent.parent):
        sync(directory)


def _unseen(path: str) -> str:
    """A name beside `path` that no reader takes: no `*.parquet`, and Arrow leaves out names that begin with a dot."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")


def _open(uri: str) -> tuple[fs.FileSystem, str]:
    try:
        return fs.FileSystem.from_uri(uri)
    except (OSError, pa.ArrowInvalid, ValueError) as error:
        first = error
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(uri)
    except (OSError, ValueError, ImportError) as error:
        problem = f"{_line(first)}; {_line(error)}"
        raise UserError(f"{uri!r} names no file system ({problem})", where="store", fix="give a directory, s3://… or gs://…") from None
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), str(root)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
