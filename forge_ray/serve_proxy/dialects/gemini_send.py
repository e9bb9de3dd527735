"""`send` callables that put the app's chat responses into Gemini's form on their way to the client.

An error of the app passes as it is: the edge words it. A stream is passed on chunk by chunk, nothing is held back but the finish reason,
which shares the last chunk with the usage that the app gives right after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Send

from forge_ray.serve_proxy.dialects.fields import Json
from forge_ray.serve_proxy.dialects.gemini_reply import Parts, chunk, finish
from forge_ray.serve_proxy.sse import SseData


class Whole:
    """Of a unary response: `convert(body)` makes the body for the client."""

    def __init__(self, send: Send, convert: Callable[[Json], Json]) -> None:
        self._send, self._convert = send, convert
        self._start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            self._start = message
        elif message["type"] != "http.response.body" or self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                said = json.loads(self._body)
                body = _dump(self._convert(said)) if isinstance(said, dict) else bytes(self._body)  # nothing, to a client that left
                headers = [(b"content-type", b"application/json; charset=UTF-8"), (b"content-length", str(len(body)).encode())]
                await self._send({**self._start, "headers": _other_headers(self._start) + headers})
                await self._send({"type": "http.response.body", "body": body, "more_body": False})


class Stream:
    """Of a streamed response. `sse`: as server-sent events; else as a JSON array that grows. `thoughts`: give out thought parts."""

    def __init__(self, send: Send, *, sse: bool, thoughts: bool) -> None:
        self._send, self._sse = send, sse
        self._events, self._parts = SseData(), Parts(thoughts)
        self._failed, self._begun = True, False
        self._last: tuple[Json, list[Json], Json] | None = None
        """The last chunk, while its usage is not known: the app's chunk, the parts, the end."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            self._failed = False
            kind = b"text/event-stream" if self._sse else b"application/json; charset=UTF-8"
            await self._send({**message, "headers": [*_other_headers(message), (b"content-type", kind)]})
        elif message["type"] != "http.response.body" or self._failed:
            await self._send(message)
        else:
            more = message.get("more_body", False)
            made = [self._frame(item) for data in self._events.feed(message.get("body", b"")) for item in self._event(data)]
            if not more:
                made += [self._frame(item) for item in self._end()]
                if not self._sse:
                    made.append(b"]" if self._begun else b"[]")
            if made or not more:
                await self._send({**message, "body": b"".join(made)})

    def _event(self, data: bytes) -> list[Json]:
        if data == b"[DONE]":
            return self._end()
        chat: Json = json.loads(data)
        if "error" in chat:
            self._last = None
            return [{"error": _error(chat["error"])}]
        made = self._end() if self._last is not None and chat.get("choices") else []
        if self._last is not None and chat.get("usage"):
            return [*made, *self._end(chat["usage"])]
        for choice in chat.get("choices") or ():
            parts, reason = self._parts.message(choice.get("delta") or {}), choice.get("finish_reason")
            if reason is not None:
                parts += self._parts.flush(cut=reason == "length")
                self._last = chat, parts or self._parts.last(), finish(reason, self._parts)
            elif parts:
                made.append(chunk(chat, parts, {}, None))
        return made

    def _end(self, used: Json | None = None) -> list[Json]:
        if self._last is None:
            return []
        (chat, parts, end), self._last = self._last, None
        return [chunk(chat, parts, end, used)]

    def _frame(self, item: Json) -> bytes:
        if self._sse:
            return b"data: " + _dump(item) + b"\n\n"
        opening, self._begun = b",\n" if self._begun else b"[", True
        return opening + _dump(item)


def _error(error: Any) -> Json:
    """An error inside a stream, which has begun and so has no status of its own."""
    message = error.get("message") if isinstance(error, dict) else error
    return {"code": 500, "message": str(message or "Internal error"), "status": "INTERNAL"}


def _other_headers(start: Message) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in start.get("headers", []) if name.lower() not in (b"content-type", b"content-length")]


def _dump(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
