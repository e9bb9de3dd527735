"""A run's numbers in Ray's own metrics: what Prometheus would collect from the node's agent."""

from __future__ import annotations

import time

import httpx

from forge_ray.report.sinks import Sinks
from forge_ray.report.sinks.ray_metrics import RayMetrics


def test_prometheus_finds_a_runs_numbers(cluster: None, http: httpx.Client) -> None:
    import ray

    port = ray.nodes()[0]["MetricsExportPort"]
    sinks = Sinks({"ray": lambda: RayMetrics("the-run")}, lambda text: (_ for _ in ()).throw(AssertionError(text)))
    sinks.send({"step": 3, "reward_mean": 0.625, "outcomes": {"ok": 7}})
    deadline, found = time.monotonic() + 120, {}
    while len(found) < 2 and time.monotonic() < deadline:
        lines = [line for line in http.get(f"http://127.0.0.1:{port}/metrics").text.splitlines() if 'run="the-run"' in line]
        found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "reward_mean" in line or "outcomes_ok" in line}
        time.sleep(1)
    sinks.close()
    assert found == {"ray_forge_ray_reward_mean": 0.625, "ray_forge_ray_outcomes_ok": 7.0}
