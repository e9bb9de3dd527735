"""A run with pools and a scripted policy on a cluster of the test's own: the real proxy, sandboxes, tasks and harness programs; only the
sampled tokens come from a script (`forge_ray.serve_proxy.scripted_engine`)."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_ray.config import Config
from forge_ray.rollout import RolloutRecord, RolloutRequest
from forge_ray.run_dir import RunDir, write_json
from forge_ray.serve_proxy.sessions import Sessions
from tests.integration.conftest import start_ray
from tests.tiny_model import tiny_model


def call(name: str, **arguments: Any) -> str:
    """A tool call in the words of the policy (Hermes)."""
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_task(directory: Path, name: str, instruction: str, test: str, toml: str = "") -> str:
    """A task directory in Harbor's format; returns its path. `test` is the body of tests/test.sh, run in the workspace."""
    root = directory / name
    for folder in ("environment", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "task.toml").write_text(toml)
    (root / "instruction.md").write_text(instruction)
    (root / "environment" / "Dockerfile").write_text("FROM debian:12\nWORKDIR /app\n")
    (root / "tests" / "test.sh").write_text("#!/bin/bash\n" + textwrap.dedent(test))
    return str(root)


ANSWER_IS_42 = """
if [ "$(cat answer.txt 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi > "${VERIFIER_DIR:-/logs/verifier}/reward.txt"
"""


@dataclass
class Workbench:
    """A served scripted policy and one pool."""

    config: Config
    run: RunDir
    client: Any
    pool: Any
    tasks: Path
    _keys: dict[str, int] = field(default_factory=dict)

    def request(self, harness: str, task: str, key: str | None = None) -> RolloutRequest:
        """A request with a fresh key."""
        if key is None:
            name = harness.rpartition(":")[2]
            self._keys[name] = self._keys.get(name, -1) + 1
            key = f"{name}-{self._keys[name]}"
        return RolloutRequest(key=key, purpose="train", task=task, task_name=Path(task).name, harness=harness, group=0)

    def start(self, request: RolloutRequest) -> Any:
        """Hand the request to the pool; returns Ray's reference."""
        return self.pool.run.remote(request.model_dump_json())

    def rollout(self, harness: str, task: str) -> RolloutRecord:
        """Run one to its end."""
        import ray

        return RolloutRecord.model_validate_json(ray.get(self.start(self.request(harness, task)), timeout=600))

    def calls(self, session: str) -> list[Any]:
        """What the call log holds of a session, ordered by completion."""
        from forge_ray.trajectories.call_log import CallLogReader

        reader = CallLogReader(self.run.calls)
        reader.refresh()
        return reader.session(session)

    def sessions(self) -> Sessions:
        """What issues the tokens of this run."""
        return Sessions(bytes.fromhex(json.loads(self.run.state.read_text())["secret"]))

    def log(self, record: RolloutRecord, name: str = "harness") -> str:
        path = self.run.rollouts / record.id / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def status(self) -> dict[str, Any]:
        import ray

        return ray.get(self.pool.status.remote(), timeout=120)


@contextmanager
def workbench(root: Path, name: str, harnesses: list[dict[str, Any]], script: list[dict[str, Any]], **sections: Any) -> Iterator[Workbench]:
    """Ray, the proxy on a scripted policy with a long window, and one pool; everything is gone afterwards."""
    import ray

    from forge_ray.actors.rollout_pool import start_pools
    from forge_ray.serve_proxy import deployment

    (root / "script.json").write_text(json.dumps(script))
    config = Config.model_validate(
        {
            "name": name,
            "policy": {
                "model": str(tiny_model()),
                "script": str(root / "script.json"),
                "engine": {"max_model_len": 98304, "dtype": "float32", "hf_overrides": {"max_position_embeddings": 98304}},
                "server": {"tool_call_parser": "hermes"},
            },
            "proxy": {"port": int(os.environ.get("FORGE_RAY_TEST_PORT", "18745")), **sections.pop("proxy", {})},
            "harnesses": harnesses,
            "tasks": {"train": str(root / "tasks")},
            "eval": {"before": False, "after": False},
            **sections,
        }
    )
    run = RunDir(root / "run").create()
    write_json(run.state, {"incarnation": 1, "secret": os.urandom(32).hex()}, mode=0o600)
    # On a busy machine Serve's proxy takes longer to start than the 5 s that its controller allows by default, three times, and is killed.
    start_ray(RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="120", RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S="120")
    try:
        client = deployment.start(config, run, config.policy.model.path, 1)
        pool = start_pools(config, run, client)[0]
        bench = Workbench(config, run, client, pool, root / "tasks")
        try:
            yield bench
        finally:
            ray.get(pool.shutdown.remote(), timeout=120)
            deployment.stop(client.app)
    finally:
        ray.shutdown()
