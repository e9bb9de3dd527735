"""Our proxy on a Ray cluster of its own, and beside it Serve's floor. `python -m benchmarks.parts.served SPEC`.

The floor is vLLM's app in a replica of the same Serve, behind the same proxy, with nothing of ours: what it takes beyond the app under
uvicorn is Serve's own. A deployment that sends the same bytes without computing them would not do: its chunks go out in fewer packets.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.parts.asgi import bare_app, make_config, make_run, scripted
from benchmarks.parts.conversation import Words
from forge_ray import ray_env
from forge_ray.config import Config

FLOOR = "/floor"


class Plain:
    """vLLM's app in a replica, neither edge nor engine tap."""

    def __init__(self, config: Config) -> None:
        self.config = config

    async def __serve_build_asgi_app__(self) -> Any:
        return await bare_app(self.config)


def start_ray(ports: int, directory: str, *, store_mb: int = 256) -> None:
    """A cluster of this process's own; its ports begin at `ports`."""
    own = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": ports + 100,
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": ports + 199,
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": ports + 200,
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": ports + 299,
        "RAY_SERVE_HAPROXY_METRICS_PORT": ports + 1,
        "RAY_SERVE_HAPROXY_STATS_PORT": ports + 2,
    }
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray reads it so
    os.environ.pop("RAY_ADDRESS", None)
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=store_mb * 2**20,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _temp_dir=directory,
        runtime_env={"env_vars": ray_env.worker()},
    )


def main() -> int:
    spec = json.loads(sys.argv[1])
    ray_env.apply()
    if not spec["haproxy"]:
        for name in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"):
            os.environ[name] = "0"
    root = Path(tempfile.mkdtemp(prefix="fr-bench-"))
    try:
        start_ray(spec["port"], str(root / "r"))
        import ray
        from ray import serve

        from forge_ray.serve_proxy import deployment

        words = Words(**json.loads(Path(spec["words"]).read_text()))
        config, run = make_config(root, Path(spec["model"]), scripted(words), spec["port"]), make_run(root / "run")
        client = deployment.start(config, run, config.policy.model.path, 1)
        if spec["haproxy"]:
            quiet = {"log_level": "WARNING", "enable_access_log": False}
            floor = serve.deployment(name="floor", max_ongoing_requests=1_000_000, logging_config=quiet)
            serve.run(floor(serve.ingress()(Plain)).bind(config), name="floor", route_prefix=FLOOR)
        print(json.dumps({"base": client.base_url, "calls": str(run.calls)}), flush=True)
        sys.stdin.read()  # until the benchmark closes it
        if spec["haproxy"]:
            serve.delete("floor")
        deployment.stop(client.app)
        ray.shutdown()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
