"""Weights on their way from the trainer into the live replicas.

The trainer's rank 0 `publish`es: a safetensors file named after the version, durable. The driver then `sync`s: every replica gets the file
ready and checks it, `weights/current.json` is made to name it, every replica switches (`serve_proxy/switch.py`). So a replica that
(re)starts at any moment finds whole weights, those that the others serve.

The file is read in place by replicas on the node that wrote it; to other nodes its bytes go through Ray's object store, straight from that
node, one copy each (`serve_proxy/parcel.py`). Of adapters only these are published and sent (`serve_proxy/weights.py` has the form).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray import disk
from forge_ray.run_dir import RunDir, write_json
from forge_ray.train_loop import room

if TYPE_CHECKING:
    import torch

    from forge_ray.config.sync import Sync
    from forge_ray.serve_proxy.client import ProxyClient

KEPT = 3
"""Weight files kept: the current one and those that a replica may just be reading."""


def collect(tensors: Iterable[tuple[str, torch.Tensor]], *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Copies of `tensors` in host memory, one after the other; with `keep` false only gone through (it may be collective)."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors if keep}


def publish(run: RunDir, tensors: Mapping[str, torch.Tensor], version: str, metadata: Mapping[str, str] | None = None) -> Path:
    """Write `tensors` as version `version`: the model's parameters (tied ones once), or adapters, which `metadata` says
    (`serve_proxy/weights.py`)."""
    target = run.weights / f"{version}.safetensors"
    write(target, tensors, {**(metadata or {}), "version": version})
    now = current(run)
    served = None if now is None else Path(now["path"])
    files = sorted(run.weights.glob("[!.]*.safetensors"), key=lambda file: file.stat().st_mtime)
    for old in files[:-KEPT]:
        if old != served:
            old.unlink(missing_ok=True)
    return target


def write(target: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file that is whole and on disk, or not there. Raises `DiskFull`."""
    from safetensors.torch import save_file

    temporary = target.with_name(f".new.{target.name}")
    try:
        with room.needed(f"the weights {target.name}", target.parent):
            save_file(dict(tensors), temporary, metadata=dict(metadata))
            disk.sync(temporary)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, target)


def make_current(run: RunDir, path: str | Path, version: str) -> None:
    """From now on a replica that starts serves `version`. Durable."""
    write_json(run.weights / "current.json", {"version": version, "path": Path(path).name})  # a name: a run may be moved


def current(run: RunDir) -> dict[str, str] | None:
    """`{"version", "path"}` (the path absolute) of the current weights, or None before the first update."""
    file = run.weights / "current.json"
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    return {**found, "path": str(run.current_weights(found["path"]))}


async def sync(client: ProxyClient, run: RunDir, path: str, version: str, settings: Sync, *, node: str | None = None) -> dict[str, Any]:
    """Bring every live replica to `version` and make it the run's current one; returns `switch`'s figures and `bytes`. Idempotent.

    `node`: Ray's id of the node that wrote the file at `path`; None: this one.
    """
    import ray

    from forge_ray.serve_proxy.client import Parcel

    node = node or ray.get_runtime_context().get_node_id()
    replicas = await client.status(timeout_s=settings.timeout_s)
    away = {replica["node"] for replica in replicas} - {node}
    parcel = Parcel(path, node, [_fetch(path, node)] if away else None)
    told = await client.update_weights(
        parcel, version, settings.timeout_s, pause=settings.pause, decide=lambda: make_current(run, path, version)
    )
    return {**told, "bytes": os.stat(path).st_size * len(away)}


def _fetch(path: str, node: str) -> Any:
    """A reference to the bytes of a file on `node`, which stay there until somebody else asks for them."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return _reader().options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(path)


@cache
def _reader() -> Any:
    """The remote function, once: each one made is another for the cluster to keep."""
    import ray

    @ray.remote(num_cpus=0, max_retries=3)
    def read(path: str) -> Any:
        import numpy

        return numpy.fromfile(path, dtype=numpy.uint8)

    return read
