"""A replica's side of a weight update, before the engine: which weights are current, and the files the engine's workers read.

The workers are processes of their own without a connection to Ray, so what arrives through the object store is laid down as a file in
shared memory until the update is over. A file is checked against the checkpoint's tensor names and shapes first: vLLM loads what it is
given and says nothing about what is missing.

A file holds all weights, or adapters: then its metadata has `lora`, its tensors are `<module>.lora_A` (rank, in) and `<module>.lora_B`
(out, rank), and `scale:<module>` is what their product is multiplied by before it is added to `<module>.weight` of the base. The base is
the file that the metadata's `base` names beside it, or the model directory that is served.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.errors import ForgeRayError
from forge_ray.run_dir import RunDir

if TYPE_CHECKING:
    import torch

PREFIX = "forge-ray-"
"""Of the files in shared memory; the process id of the replica that wrote it follows."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype as safetensors spells it, shape)."""


class WeightMismatch(ForgeRayError):
    """The weights are not those of the served model."""


@dataclass(frozen=True)
class WeightFiles:
    """What the engine's workers read."""

    path: str
    base: tuple[str, ...] = ()
    """Safetensors files that the adapters in `path` are added to; none: `path` holds all weights."""


def current(run: RunDir) -> tuple[str, str] | None:
    """`(version, path)` of the newest published weights, or None before the first update."""
    try:
        found = json.loads((run.weights / "current.json").read_text())
    except FileNotFoundError:
        return None
    return found["version"], str(run.current_weights(found["path"]))


def header(path: str | Path) -> Tensors:
    """Tensor names, types and shapes of a safetensors file. Raises `WeightMismatch` if it is none."""
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in _entries(path).items() if name != "__metadata__"}


def metadata(path: str | Path) -> dict[str, str]:
    """The texts that a safetensors file carries. Raises `WeightMismatch` if it is none."""
    return _entries(path).get("__metadata__", {})


def checkpoint(model_dir: str | Path) -> Tensors | None:
    """The tensors of a model directory; None where it holds no safetensors."""
    merged: Tensors = {}
    for file in sorted(Path(model_dir).glob("*.safetensors")):
        merged.update(header(file))
    return merged or None


def files(path: str, run: RunDir, model_dir: str) -> WeightFiles:
    """The file at `path` with the base that it names. Raises `WeightMismatch` where that is missing."""
    told = metadata(path)
    if "lora" not in told:
        return WeightFiles(path)
    named = told.get("base")
    base = [run.weights / named] if named else sorted(Path(model_dir).glob("*.safetensors"))
    if not base or not all(file.is_file() for file in base):
        raise WeightMismatch(f"the base of the adapters is not there ({run.weights / named if named else model_dir})")
    return WeightFiles(path, tuple(str(file) for file in base))


def check(found: WeightFiles, expected: Tensors | None, *, tied: bool) -> None:
    """Raise `WeightMismatch` unless `found` holds every tensor of the checkpoint in its shape, and no other; adapters must fit theirs. With
    tied embeddings the head may be left out. Types may differ: the engine casts."""
    given = header(found.path)
    if expected is None:
        return
    if found.base:
        _check_adapters(given, expected, metadata(found.path))
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


def tensors(found: WeightFiles, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the weights by its name, one after the other; adapters are added into theirs in float32 (W + scale · B A)."""
    from safetensors import safe_open

    if not found.base:
        with safe_open(found.path, "pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
        return
    told = metadata(found.path)
    with safe_open(found.path, "pt", device=device) as adapters:
        adapted = {name.removesuffix(".lora_A") for name in adapters.keys() if name.endswith(".lora_A")}  # noqa: SIM118
        for path in found.base:
            with safe_open(path, "pt", device=device) as base:
                for name in base.keys():  # noqa: SIM118
                    weight, module = base.get_tensor(name), name.removesuffix(".weight")
                    if name.endswith(".weight") and module in adapted:
                        a, b = (adapters.get_tensor(f"{module}.lora_{which}").float() for which in "AB")
                        weight = weight.float() + (b @ a) * float(told[f"scale:{module}"])
                    yield name, weight


def _check_adapters(given: Tensors, expected: Tensors, told: Mapping[str, str]) -> None:
    for name, (_, shape) in given.items():
        module, dot, kind = name.rpartition(".")
        if not dot or kind not in ("lora_A", "lora_B"):
            raise WeightMismatch(f"{name} is no part of an adapter")
        if f"{module}.weight" not in expected or f"scale:{module}" not in told:
            raise WeightMismatch(f"the served model has no {module}.weight, or the file no scale for it")
        other = given.get(f"{module}.lora_{'B' if kind == 'lora_A' else 'A'}")
        rows, columns = expected[f"{module}.weight"][1]
        inner = 0 if kind == "lora_A" else 1
        fits = shape[1 - inner] == (columns if kind == "lora_A" else rows)
        if other is None or not fits or other[1][1 - inner] != shape[inner]:
            raise WeightMismatch(f"{name} of shape {list(shape)} does not fit {module}.weight of shape {[rows, columns]}")


def _entries(path: str | Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > os.fstat(file.fileno()).st_size:
                raise ValueError("its header is longer than the file")
            return json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise WeightMismatch(f"{path} is no safetensors file ({error})") from error


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
