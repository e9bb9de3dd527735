"""One Ray cluster and one deployed proxy with the real engine for all integration tests of a pytest session.

The cluster is this process's own, with ports of its own, so that tests can run beside other clusters of the machine. The proxy serves the
tiny model in fp32. Training calls sample at temperature 1, evaluation calls at 0.7, so both are met in one deployment.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge_ray import ray_env
from forge_ray.config import Config
from forge_ray.rollout import Purpose
from forge_ray.run_dir import RunDir, write_json
from forge_ray.serve_proxy.sessions import Sessions
from tests.tiny_model import tiny_model

WINDOW = 2048
UPSTREAM_KEY, UPSTREAM_SESSION = "FORGE_RAY_TEST_UPSTREAM_KEY", "behind-the-proxy"
LONG_TEXT = "def main(argument):\n" * 60
"""More than 300 tokens: longer than two blocks of the prefix cache."""


def make_config(name: str, port: int, **policy: Any) -> Config:
    """A valid config around the tiny model; only what the proxy reads matters."""
    proxy = policy.pop("proxy", {})
    return Config.model_validate(
        {
            "name": name,
            "policy": {
                "model": str(policy.pop("model", None) or tiny_model()),
                "engine": {"max_model_len": WINDOW},
                "server": {"tool_call_parser": "hermes"},
                "sampling": {"temperature": 1.0},
                "eval_sampling": {"mode": "fixed", "temperature": 0.7},
                **policy,
            },
            "proxy": {"port": port, **proxy},
            "harnesses": [{"name": "react"}],
            "tasks": {"train": "tasks"},
            "eval": {"before": False, "after": False},
        }
    )


def make_run(root: Path) -> RunDir:
    """An empty run directory with a secret."""
    run = RunDir(root).create()
    write_json(run.state, {"incarnation": 1, "secret": "ab" * 32}, mode=0o600)
    return run


@dataclass
class Served:
    """A deployed proxy and what a test needs around it."""

    config: Config
    run: RunDir
    client: Any
    sessions: Sessions
    _count: int = field(default=0)

    def session(self, name: str, purpose: Purpose = "train") -> tuple[str, str]:
        """A fresh session id and its base URL."""
        self._count += 1
        session = f"{name}-{self._count}.0"
        return session, self.client.url(self.sessions.issue(session, purpose))

    def calls(self, session: str) -> list[Any]:
        """The session's calls as the log has them now."""
        from forge_ray.trajectories.call_log import CallLogReader

        reader = CallLogReader(self.run.calls)
        reader.refresh()
        return reader.session(session)


def start_ray(**environment: str) -> None:
    """A cluster of this process's own."""
    block = os.environ.get("FORGE_RAY_TEST_PORTS", "30000,31000,9110,8410").split(",")
    http, grpc, metrics, stats = (int(value) for value in block)
    own = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": http,
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": http + 99,
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": grpc,
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": grpc + 99,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics,
        "RAY_SERVE_HAPROXY_STATS_PORT": stats,
    }
    os.environ.update({name: str(value) for name, value in own.items()} | environment)
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray reads it so
    os.environ.pop("RAY_ADDRESS", None)
    ray_env.apply()
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        log_to_driver=False,
        logging_level=logging.WARNING,
        # Short: Ray's sockets lie below it.
        _temp_dir=os.environ.get("FORGE_RAY_TEST_RAY_TMP", "/tmp/fr-tests"),
        runtime_env={"env_vars": ray_env.worker()},
    )


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray, connected."""
    import ray

    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def served(cluster: None) -> Iterator[Served]:
    """The proxy with the real engine on the tiny model."""
    from forge_ray.serve_proxy import deployment

    root = Path(tempfile.mkdtemp(prefix="forge-ray-run-"))
    port = int(os.environ.get("FORGE_RAY_TEST_PORT", "18710"))
    # Another model behind the proxy: the proxy itself, as it is for a session of its own.
    upstreams = {"teacher": {"url": f"http://127.0.0.1:{port}/v1", "key_env": UPSTREAM_KEY, "model": "policy"}}
    os.environ[UPSTREAM_KEY] = Sessions(bytes.fromhex("ab" * 32)).issue(UPSTREAM_SESSION, "train")
    config = make_config("integration", port, proxy={"upstreams": upstreams})
    run = make_run(root)
    client = deployment.start(config, run, config.policy.model.path, 1)
    yield Served(config, run, client, Sessions(bytes.fromhex("ab" * 32)))
    deployment.stop(client.app)
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=300) as client:
        yield client
