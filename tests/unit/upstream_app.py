"""Another model's server in small: it says what a test tells it, in the pieces the test wants, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from forge_ray.config import Config
from forge_ray.serve_proxy.upstream_routes import Keys, Targets
from tests.unit.edge_app import Rig
from tests.unit.test_edge_wire import serve

KEY = "sk-the-upstreams-own-key"
SSE = "text/event-stream; charset=utf-8"


def config_of(upstreams: dict[str, Any], **more: Any) -> Config:
    tree: dict[str, Any] = {"name": "u", "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t"}}
    return Config.model_validate(tree | {"proxy": {"upstreams": upstreams}, "eval": {"before": False, "after": False}} | more)


@dataclass
class Other:
    """The server. `pieces` are sent as they are; None waits for `gate`, an exception is raised in the stream."""

    pieces: list[Any] = field(default_factory=list)
    status: int = 200
    kind: str = SSE
    headers: dict[str, str] = field(default_factory=dict)
    silent: bool = False
    """Waits for `gate` before anything else."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    seen_headers: list[dict[str, str]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        self.raw.append(await request.body())
        self.asked.append(json.loads(self.raw[-1]))
        self.seen_headers.append(dict(request.headers))
        self.urls.append(str(request.url))
        if self.silent:
            await self.gate.wait()
        if self.kind != SSE:
            content = b"".join(self.pieces)
            await Response(content, self.status, {"content-type": self.kind, **self.headers})(scope, receive, send)
            return
        await StreamingResponse(self._stream(), self.status, {"content-type": self.kind, **self.headers})(scope, receive, send)

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            for piece in self.pieces:
                if piece is None:
                    await self.gate.wait()
                elif isinstance(piece, BaseException):
                    raise piece
                else:
                    yield piece
                    await asyncio.sleep(0.01)  # a packet of its own
        except asyncio.CancelledError:
            self.left.set()
            raise


@asynccontextmanager
async def behind(directory: Path, other: Other, **settings: Any) -> AsyncIterator[tuple[Rig, str]]:
    """An edge on a real server with `other` behind it as the model `judge`; the rig and the URL of a session."""
    async with serve(other) as there:
        config = config_of({"judge*": {"url": f"{there}/v1", "key_env": "JUDGE_KEY", **settings}})
        rig = Rig(directory, targets=Targets(config, Keys.of(config, {"JUDGE_KEY": KEY})))
        async with serve(rig.edge) as url:
            yield rig, f"{url}/s/{rig.token()}"
        rig.log.close()


def sse(*events: dict[str, Any]) -> list[bytes]:
    """One piece per event."""
    names = [f"event: {event['type']}\n" if "type" in event else "" for event in events]
    return [f"{name}data: {json.dumps(event)}\n\n".encode() for name, event in zip(names, events, strict=True)]
