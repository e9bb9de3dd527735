"""The scripted upstream: a model server that says what a script says, in four dialects, streamed or not.

It evaluates the same rules as the scripted engine (`serve_proxy.scripted_engine`), on the text of the request instead of a rendered prompt,
and keeps no state but the counts of faults. Reasoning, text and raw arguments go out as scripted. Token counts are made up from lengths.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncGenerator

from aiohttp import web

from forge_ray.conformance import dialects
from forge_ray.conformance.dialects.base import TURN, Usage, Wire
from forge_ray.conformance.door import Head
from forge_ray.conformance.reply import read
from forge_ray.serve_proxy.scripted_engine import Script

WINDOW = 1_000_000
_JSON = {"Content-Type": "application/json"}
_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class Upstream:
    """A source of answers for a `door.Door`."""

    def __init__(self, script: Script, model: str = "policy") -> None:
        self.script, self.model = script, model
        self.said: dict[str, list[str]] = defaultdict(list)
        """Mark of a conversation -> names of the rules that answered it, in order; "" for an answer that no rule gave."""

    async def __call__(self, request: web.Request, body: bytes) -> AsyncGenerator[Head | bytes, None]:
        wire = dialects.of(request.path) if request.method == "POST" else None
        answer = self._complete(wire, request.path, body) if wire is not None else self._probe(request.method, request.path)
        async for part in answer:
            yield part

    async def _complete(self, wire: Wire, path: str, body: bytes) -> AsyncGenerator[Head | bytes, None]:
        asked = json.loads(body)
        prompt = wire.prompt(asked)
        if self.script.overflows(prompt, TURN):
            yield Head(400, _JSON)
            yield json.dumps(wire.error(400, wire.overflow(WINDOW + 1, WINDOW))).encode()
            return
        rule = self.script.answer(prompt, TURN)
        self.said[self.script.whose(prompt)].append(rule.name)
        say = rule.say or ""
        reply, usage = read(say), Usage(len(prompt) // 3, len(say) // 3 + 1)
        if not wire.streams(path, asked):
            yield Head(200, _JSON)
            yield json.dumps(wire.unary(reply, usage, asked), ensure_ascii=False).encode()
            return
        yield Head(200, _STREAM)
        for event in wire.events(reply, usage, asked):
            await asyncio.sleep(rule.delay_s)
            yield event

    async def _probe(self, method: str, path: str) -> AsyncGenerator[Head | bytes, None]:
        """What programs ask for beside completions."""
        if path.endswith("/models"):
            yield Head(200, _JSON)
            yield json.dumps(
                {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "script"}]}
            ).encode()
        elif path.endswith(("/count_tokens", ":countTokens")):
            yield Head(200, _JSON)
            yield json.dumps({"input_tokens": 1000, "totalTokens": 1000}).encode()
        elif path.endswith("/responses") and method == "GET":
            yield Head(426, _JSON)
            yield b'{"error": {"message": "use POST"}}'
        else:
            yield Head(200 if method in ("HEAD", "GET") else 404, _JSON)
            if method != "HEAD":
                yield b"{}"
