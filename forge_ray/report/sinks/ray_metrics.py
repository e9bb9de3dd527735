"""Ray's own metrics: gauges `forge_ray_<name>` with the tag `run`, which every node's agent exports for Prometheus and the dashboard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class RayMetrics:
    """Needs a connection to Ray at the first write. A gauge keeps its last value."""

    name = "ray"

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from ray.util.metrics import Gauge

        for name, value in {"step": float(step), **values}.items():
            key = f"forge_ray_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            if key not in self._gauges:
                self._gauges[key] = Gauge(key, description=f"{name} of a run's newest training step or evaluation", tag_keys=("run",))
            self._gauges[key].set(value, tags={"run": self._run})

    def close(self) -> None:
        self._gauges.clear()
