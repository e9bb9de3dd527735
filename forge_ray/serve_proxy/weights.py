"""A replica's side of a weight update, before the engine: which weights are current, and the file the engine's workers read.

The workers are processes of their own without a connection to Ray, so what arrives through the object store is laid down as a file in
shared memory for the time of the update. A file is checked against the checkpoint's tensor names and shapes first: vLLM loads what it is
given and says nothing about what is missing.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_ray.errors import ForgeRayError
from forge_ray.run_dir import RunDir

PREFIX = "forge-ray-"
"""Of the files in shared memory; the process id of the replica that wrote it follows."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype as safetensors spells it, shape)."""


class WeightMismatch(ForgeRayError):
    """The weights are not those of the served model."""


def current(run: RunDir) -> tuple[str, str] | None:
    """`(version, path)` of the newest published weights, or None before the first update."""
    try:
        found = json.loads((run.weights / "current.json").read_text())
    except FileNotFoundError:
        return None
    return found["version"], str(run.current_weights(found["path"]))


def header(path: str | Path) -> Tensors:
    """Tensor names, types and shapes of a safetensors file. Raises `WeightMismatch` if it is none."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > os.fstat(file.fileno()).st_size:
                raise ValueError("its header is longer than the file")
            entries = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise WeightMismatch(f"{path} is no safetensors file ({error})") from error
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items() if name != "__metadata__"}


def checkpoint(model_dir: str | Path) -> Tensors | None:
    """The tensors of a model directory; None where it holds no safetensors."""
    files = sorted(Path(model_dir).glob("*.safetensors"))
    merged: Tensors = {}
    for file in files:
        merged.update(header(file))
    return merged or None


def check(path: str | Path, expected: Tensors | None, *, tied: bool) -> None:
    """Raise `WeightMismatch` unless the file at `path` holds every tensor of the checkpoint in its shape, and no other. With tied
    embeddings the head may be left out. Types may differ: the engine casts."""
    given = header(path)
    if expected is None:
        return
    optional = {"lm_head.weight"} if tied else set()
    missing, extra = set(expected) - set(given) - optional, set(given) - set(expected) - optional
    if missing or extra:
        what = [f"misses {sorted(missing)[0]} ({len(missing)} in all)"] if missing else []
        what += [f"brings {sorted(extra)[0]} ({len(extra)} in all)"] if extra else []
        raise WeightMismatch(f"the weights are not those of the served model: the file {' and '.join(what)}")
    for name in set(given) & set(expected):
        if given[name][1] != expected[name][1]:
            raise WeightMismatch(f"{name} has shape {list(given[name][1])}, the served model {list(expected[name][1])}")


def _remove_orphans(directory: Path) -> None:
    """Remove the files of replicas that were killed during an update: they hold memory until somebody does."""
    for file in directory.glob(f"{PREFIX}*.safetensors"):
        owner = file.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            file.unlink(missing_ok=True)


@contextmanager
def as_file(payload: Any) -> Iterator[str]:
    """The path of a file with `payload`: the bytes of a safetensors file (bytes, memoryview, uint8 array), or already a path."""
    if isinstance(payload, str | os.PathLike):
        yield os.fspath(payload)
        return
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    if shared:
        _remove_orphans(Path(shared))
    handle, path = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", suffix=".safetensors", dir=shared)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            view = memoryview(payload).cast("B")
            written = 0
            while written < len(view):
                written += file.write(view[written:]) or 0
        yield path
    finally:
        Path(path).unlink(missing_ok=True)
