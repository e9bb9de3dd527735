"""Weights on their way from the trainer into the live replicas.

The trainer's rank 0 `publish`es: a safetensors file named after the version, then `weights/current.json`, both durable, so that a
replica that (re)starts at any moment finds the newest complete version. The driver then `sync`s: the file's bytes go through Ray's
object store (one copy per node, zero-copy to its replicas) and every replica loads them through vLLM's weight-transfer protocol
before the call returns.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.run_dir import RunDir, write_json

if TYPE_CHECKING:
    import torch

    from forge_ray.serve_proxy.client import ProxyClient

KEPT = 3
"""Weight files kept: the current one and those that a replica may just be reading."""


def publish(run: RunDir, model: torch.nn.Module, version: str) -> Path:
    """Write the parameters of `model` (tied ones once) as version `version` and make it the current one."""
    from safetensors.torch import save_file

    tensors = {name: parameter.detach().to("cpu").contiguous() for name, parameter in model.named_parameters()}
    target = run.weights / f"{version}.safetensors"
    temporary = target.with_name(f".{target.name}")
    save_file(tensors, temporary, metadata={"version": version})
    handle = os.open(temporary, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    os.replace(temporary, target)
    write_json(run.weights / "current.json", {"version": version, "path": target.name})  # a run may be moved
    files = sorted(run.weights.glob("[!.]*.safetensors"), key=lambda file: file.stat().st_mtime)
    for old in files[:-KEPT]:
        old.unlink(missing_ok=True)
    return target


def current(run: RunDir) -> dict[str, str] | None:
    """`{"version", "path"}` (the path absolute) of the current weights, or None before the first publish."""
    file = run.weights / "current.json"
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    return {**found, "path": str(run.current_weights(found["path"]))}


async def sync(client: ProxyClient, path: str, version: str) -> dict:
    """Bring every live replica to `version`; returns the client's timings. Idempotent."""
    import numpy
    import ray

    ref = ray.put(await asyncio.to_thread(numpy.fromfile, path, dtype=numpy.uint8))
    return await client.update_weights(ref, version)
