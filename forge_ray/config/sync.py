"""`train.sync`: how new weights come into the replicas."""

from __future__ import annotations

from typing import Literal

from forge_ray.config.values import Positive, Section


class Sync(Section):
    """Weight updates of the replicas. See [asynchrony](async.md)."""

    pause: Literal["keep", "wait", "abort"] = "keep"
    """Running calls at the switch: `keep` freezes them, and they go on under the new weights; `wait` lets them end first; `abort` ends
    them, and the harness asks again."""
    backend: Literal["file", "nccl"] = "file"
    """`file`: shared memory on the trainer's node, Ray's object store to others; `nccl`: GPU to GPU (untested)."""
    timeout_s: Positive = 300
    """Time that a replica may take to get new weights ready, and again to switch (under `wait`, with its running calls); one that takes
    longer is replaced."""
