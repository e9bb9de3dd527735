"""Does what a run reserves fit into its cluster? Ray would wait for ever, without a word, for what no node can ever give.

Only a cluster of the run's own can be judged for good: another one may have nodes on the way, and there a run that waits says so
(`stall`).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass

from forge_ray.config import Config
from forge_ray.errors import UserError


@dataclass(frozen=True)
class Wish:
    """Something that is reserved as a whole for the length of the run."""

    keys: tuple[str, str]
    """How many, and how much each."""
    resource: str
    count: int
    each: float

    @property
    def amount(self) -> float:
        return self.count * self.each


def wishes(config: Config, *, training: bool) -> list[Wish]:
    """What a run reserves; without `training` the train workers are left out."""
    proxy, train = config.proxy, config.train
    found = [
        Wish(("proxy.replicas", "proxy.replica_cpus"), "CPU", proxy.replicas, proxy.replica_cpus),
        Wish(("proxy.replicas", "proxy.replica_gpus"), "GPU", proxy.replicas, proxy.replica_gpus),
    ]
    if config.train.offline is not None:
        found = []  # nothing is served
    if training:
        found += [
            Wish(("train.workers", "train.worker_cpus"), "CPU", train.workers, train.worker_cpus),
            Wish(("train.workers", "train.worker_gpus"), "GPU", train.workers, train.worker_gpus),
        ]
    return [wish for wish in found if wish.amount > 0]


def shortage(config: Config, have: Mapping[str, float], *, training: bool) -> UserError | None:
    """What a single machine with the resources `have` cannot give this run; None if it has enough. Names the key that asks for most."""
    for resource in ("CPU", "GPU"):
        wanted = [wish for wish in wishes(config, training=training) if wish.resource == resource]
        total = sum(wish.amount for wish in wanted)
        if total <= have.get(resource, 0) + 1e-6:
            continue
        most = max(wanted, key=lambda wish: wish.amount)
        number, each = most.keys
        also = f", {total:g} with what else the run reserves" if len(wanted) > 1 else ""
        fix = "or raise ray.num_cpus" if resource == "CPU" else "or join a cluster that has them: ray.address"
        return UserError(
            f"{number}={most.count} × {each}={most.each:g} take {most.amount:g} {resource}s{also}, and the run's own cluster has "
            f"{have.get(resource, 0):g}",
            where=number if most.count > 1 else each,
            fix=f"ask for less, {fix}",
        )
    return None


def own(config: Config) -> dict[str, float]:
    """What a cluster of this run's own will have here."""
    return {"CPU": own_cpus(config), "GPU": _gpus()}


def own_cpus(config: Config) -> int:
    """Logical CPUs of a cluster of this run's own."""
    return config.ray.num_cpus or max(4, os.cpu_count() or 1)


def _gpus() -> float:
    """GPUs of this machine; infinitely many where there is an accelerator that only Ray knows how to count."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return 0
    if os.path.exists("/dev/kfd") or glob.glob("/dev/accel*") or os.path.exists("/dev/dxg"):
        return float("inf")
    found = glob.glob("/proc/driver/nvidia/gpus/*") or glob.glob("/dev/nvidia[0-9]*")
    return min(len(found), visible.count(",") + 1) if visible is not None else len(found)
