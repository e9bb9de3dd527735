"""vLLM's own app over the scripted engine behind the edge, in this process: everything of a replica except Ray and the model."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import httpx2

from forge_ray import ray_env
from forge_ray.serve_proxy.edge import Edge, EdgeSettings
from forge_ray.serve_proxy.growing_prompts import GrowingPrompts
from forge_ray.serve_proxy.recording import Recorder
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.serve_proxy.sessions import Sessions
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogReader, CallLogWriter
from tests.integration.conftest import make_config
from tests.tiny_model import TEMPLATE

WINDOW = 16384
SECRET = bytes(range(32))
STRICT = (
    "{%- for message in messages -%}{%- if message.role == 'system' and not loop.first -%}{{ raise_exception('system first') }}"
    "{%- endif -%}{%- endfor -%}" + TEMPLATE
)
"""A template that takes a system message only in front."""


@dataclass
class EdgeRig:
    """An edge over vLLM's app."""

    edge: Edge
    recorder: Recorder
    directory: Path
    tokenizer: Any
    prompts: GrowingPrompts | None
    """What was tokenised and is kept."""

    def base(self, session: str) -> str:
        return f"http://proxy/s/{Sessions(SECRET).issue(session, 'train')}"

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.edge), timeout=120)

    def http2(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.edge), timeout=120)

    async def post(self, session: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        async with self.http() as http:
            answer = await http.post(self.base(session) + path, json=body, headers=headers)
        assert await self.edge.drained(session, 120)
        return answer

    def reader(self) -> CallLogReader:
        reader = CallLogReader(self.directory)
        reader.refresh()
        return reader

    def calls(self, session: str) -> list[Call]:
        return self.reader().session(session)

    def prompt(self, call: Call) -> str:
        return self.tokenizer.decode(call.prompt_ids)


@asynccontextmanager
async def edge_rig(
    directory: Path,
    rules: list[dict[str, Any]],
    *,
    template: str | None = None,
    server: dict[str, Any] | None = None,
    proxy: dict[str, Any] | None = None,
    model: Path | None = None,
) -> AsyncIterator[EdgeRig]:
    """Start one. vLLM is imported here (some seconds). One at a time in a process, in the running event loop. `server`: arguments of vLLM's
    API server; `proxy`: the config's section; `model`: another directory than the tiny model's."""
    os.environ.update(ray_env.worker())
    from forge_ray.serve_proxy import vllm_internals
    from forge_ray.serve_proxy.admission import Admission

    script = directory / "script.json"
    script.write_text(json.dumps(rules))
    engine: dict[str, Any] = {"max_model_len": WINDOW, "dtype": "float32", "hf_overrides": {"max_position_embeddings": WINDOW}}
    policy: dict[str, Any] = {"script": str(script), "engine": engine, "model": model}
    if template is not None:
        (directory / "template.jinja").write_text(template)
        policy["chat_template"] = str(directory / "template.jinja")
    if server is not None:
        policy["server"] = {"tool_call_parser": "hermes", **server}
    config = make_config("edge", 18729, proxy=proxy or {}, **policy)
    args = vllm_internals.parse_arguments(config, config.policy.model.path)
    served = vllm_internals.make_engine(config, args)
    log = CallLogWriter(directory / "calls" / "r0.jsonl")
    index = SessionIndex("r0", config.proxy.limits)
    recorder = served.recorder = Recorder(
        log=log, index=index, proxy=config.proxy, window=WINDOW, version="1.0", refusals=vllm_internals.REFUSALS
    )
    app = await vllm_internals.make_app(served, args)
    admission = recorder.admission = Admission.of(config.proxy, served.vllm_config.scheduler_config.max_num_seqs)
    settings = EdgeSettings.of(config, index.window(WINDOW), directory)
    edge = Edge(app, settings=settings, sessions=Sessions(SECRET), index=index, log=log, admission=admission)
    try:
        yield EdgeRig(edge, recorder, log.path.parent, served.renderer.get_tokenizer(), served.prompts)
    finally:
        served.shutdown(timeout=1.0)
        log.close()
