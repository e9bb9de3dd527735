"""A replica's inside in this process, without Ray and without weights: vLLM's app, the edge and the recording over the scripted engine.

For what has to be rendered, parsed and recorded exactly as the served policy would be: a teacher's demonstrations, the template's audit.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ray.config import Config
from forge_ray.trajectories.call import Call


@dataclass
class Inside:
    """It, and a client of it."""

    edge: Any
    engine: Any
    http: Any
    """An `httpx.AsyncClient` whose paths begin with `/s/<token>`."""
    calls: Path
    secret: bytes
    window: int

    def __post_init__(self) -> None:
        from forge_ray.trajectories.call_log import CallLogReader

        self._reader = CallLogReader(self.calls)

    def say(self, ids: Sequence[int]) -> None:
        """What the engine answers from now on."""
        from forge_ray.serve_proxy.scripted_engine import Rule, Script

        self.engine.script = Script([Rule(ids=list(ids))])

    async def post(self, session: str, path: str, body: dict[str, Any]) -> Any:
        """One request of `session`; returns once its events are on disk."""
        from forge_ray.serve_proxy.sessions import Sessions

        answer = await self.http.post(f"/s/{Sessions(self.secret).issue(session, 'train')}{path}", json=body)
        await self.edge.drained(session, 60)
        return answer

    def recorded(self, session: str) -> list[Call]:
        """The session's calls, by completion."""
        self._reader.refresh()
        return self._reader.session(session)

    def forget(self, session: str) -> None:
        """Drop what is held of a session that is over."""
        self.edge.forget(session)
        self._reader.forget(session)


@asynccontextmanager
async def inside(config: Config, model_dir: str, directory: Path) -> AsyncIterator[Inside]:
    """Start one for `config`'s policy. `directory`: an empty one for the recording. vLLM is imported (some seconds).

    Limits, upstreams and forced grammars of the config do not matter here.
    """
    import httpx

    from forge_ray.serve_proxy import vllm_internals
    from forge_ray.serve_proxy.admission import Admission
    from forge_ray.serve_proxy.edge import Edge, EdgeSettings
    from forge_ray.serve_proxy.recording import Recorder
    from forge_ray.serve_proxy.session_index import SessionIndex
    from forge_ray.serve_proxy.sessions import Sessions
    from forge_ray.trajectories.call_log import CallLogWriter

    script = directory / "script.json"
    script.write_text('[{"say": ""}]')
    proxy = type(config.proxy)(train_grammar_calls=True, max_body_bytes=2**30)
    config = config.model_copy(update={"proxy": proxy, "policy": config.policy.model_copy(update={"script": str(script)})})
    args = vllm_internals.parse_arguments(config, model_dir)
    engine: Any = vllm_internals.make_engine(config, args)
    log, index, secret = CallLogWriter(directory / "calls" / "inside.jsonl"), SessionIndex("inside", proxy.limits), os.urandom(32)
    window = int(engine.model_config.max_model_len)
    engine.recorder = Recorder(log=log, index=index, proxy=proxy, window=window, version="0.0", refusals=vllm_internals.REFUSALS)
    admission = engine.recorder.admission = Admission.of(proxy, 16)
    try:
        app = await vllm_internals.make_app(engine, args)
        settings = EdgeSettings.of(config, window, directory)
        edge = Edge(app, settings=settings, sessions=Sessions(secret), index=index, log=log, admission=admission)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(edge), base_url="http://inside", timeout=600) as http:
            yield Inside(edge, engine, http, log.path.parent, secret, window)
    finally:
        engine.shutdown()
        log.close()
