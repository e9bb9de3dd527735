"""The proxy over the scripted engine, in this process and without Ray: vLLM's app, the edge and the call log are the real ones."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from forge_ray import ray_env
from forge_ray.config import Config
from forge_ray.rollout import Purpose
from forge_ray.run_dir import RunDir
from tests.integration.conftest import make_config, make_run

SECRET = bytes.fromhex("ab" * 32)


@dataclass
class Scripted:
    """One replica's inside."""

    config: Config
    run: RunDir
    engine: Any
    edge: Any
    app: Any
    index: Any
    recorder: Any
    http: httpx.AsyncClient
    """Its base URL is the app; paths begin with `url(session)`."""

    def url(self, session: str, purpose: Purpose = "train") -> str:
        from forge_ray.serve_proxy.sessions import Sessions

        return f"/s/{Sessions(SECRET).issue(session, purpose)}"

    def calls(self, session: str) -> list[Any]:
        from forge_ray.trajectories.call_log import CallLogReader

        reader = CallLogReader(self.run.calls)
        reader.refresh()
        return reader.session(session)

    async def chat(self, session: str, text: str = "hi", **body: Any) -> httpx.Response:
        request = {"model": "policy", "messages": [{"role": "user", "content": text}], **body}
        return await self.http.post(self.url(session) + "/v1/chat/completions", json=request)


@asynccontextmanager
async def scripted(directory: Path, rules: list[dict[str, Any]], **config: Any) -> AsyncIterator[Scripted]:
    """A proxy that answers by `rules`."""
    for name, value in ray_env.WORKER.items():
        os.environ.setdefault(name, value)
    from forge_ray.serve_proxy import vllm_internals
    from forge_ray.serve_proxy.admission import Admission
    from forge_ray.serve_proxy.disconnects import Disconnects
    from forge_ray.serve_proxy.edge import Edge, EdgeSettings
    from forge_ray.serve_proxy.recording import Recorder
    from forge_ray.serve_proxy.session_index import SessionIndex
    from forge_ray.serve_proxy.sessions import Sessions
    from forge_ray.serve_proxy.upstream_routes import Keys, Targets
    from forge_ray.trajectories.call_log import CallLogWriter

    script = directory / "script.json"
    script.write_text(json.dumps(rules))
    settings = make_config("scripted", 18719, script=str(script), **config)
    run = make_run(directory / "run")
    args = vllm_internals.parse_arguments(settings, settings.policy.model.path)
    engine = vllm_internals.make_engine(settings, args)
    index = SessionIndex("replica", settings.proxy.limits)
    log = CallLogWriter(run.calls / "replica.jsonl")
    window = int(engine.model_config.max_model_len)
    recorder = engine.recorder = Recorder(
        log=log, index=index, proxy=settings.proxy, window=window, version="1.0", refusals=vllm_internals.REFUSALS
    )
    admission = recorder.admission = Admission.of(settings.proxy, engine.vllm_config.scheduler_config.max_num_seqs)
    app = await vllm_internals.make_app(engine, args)
    limits = EdgeSettings.of(settings, index.window(window), run.bodies)
    targets = Targets(settings, Keys.of(settings))
    edge = Edge(app, settings=limits, sessions=Sessions(SECRET), index=index, log=log, admission=admission, targets=targets)
    whole = Disconnects(edge)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(whole), base_url="http://proxy", timeout=60) as http:
        yield Scripted(settings, run, engine, edge, whole, index, recorder, http)
    log.close()
    engine.shutdown()
