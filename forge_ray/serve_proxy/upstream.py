"""Passes requests for other models on to their servers, and records both ways as text.

A response crosses byte for byte as it comes. Of each exchange one `upstream` event is in the call log before the last byte of the response
is passed on, whatever became of it; a second event says whether that byte arrived. What holds back is only the last event of a stream (from
its proper end on), and the whole of a response that is none.

The policy's admission and its session limits do not apply: nothing here takes a place in the engine. Retries are the harness's business. A
redirect is no answer: a harness that followed it would show its session token to another server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import time
import uuid
from typing import Any

import httpx
from starlette.datastructures import Headers
from starlette.types import Scope, Send

from forge_ray.serve_proxy import kinds
from forge_ray.serve_proxy.dialects import Refusal
from forge_ray.serve_proxy.dialects.base import parse_object
from forge_ray.serve_proxy.dialects.fields import Json
from forge_ray.serve_proxy.exchange import Client
from forge_ray.serve_proxy.refusals import Caller, Refusals
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.serve_proxy.sessions import Session
from forge_ray.serve_proxy.under_way import UnderWay
from forge_ray.serve_proxy.upstream_replies import READERS, UpstreamReply
from forge_ray.serve_proxy.upstream_routes import Target
from forge_ray.trajectories.call_log import CallLogError, CallLogWriter
from forge_ray.trajectories.upstream import Requests

logger = logging.getLogger(__name__)

CONNECT_S = 15.0
LINGER_S = 2.0
"""How long a connection may stay open after the proper end of a stream."""
ERROR_BYTES = 2**20
RETRY_S = 2


class StreamCut(Exception):
    """A stream that has begun cannot go on: raised through the server, so that the client cannot take it for whole."""


class Upstreams:
    """The upper half of every exchange of one replica. One event loop."""

    def __init__(self, *, index: SessionIndex, log: CallLogWriter, refusals: Refusals, under_way: UnderWay) -> None:
        self._index, self._log, self._refusals, self._under_way = index, log, refusals, under_way
        self._http: httpx.AsyncClient | None = None
        self._requests: dict[str, Requests] = {}
        self._running: dict[str, set[asyncio.Task[None]]] = {}

    def abort(self, session: str) -> int:
        """End the exchanges of a session; returns how many there were."""
        running = self._running.get(session, ())
        for task in running:
            task.cancel()
        return len(running)

    def forget(self, session: str) -> None:
        """Drop what is held of a closed session."""
        self._requests.pop(session, None)

    async def serve(
        self, caller: Caller, session: Session, target: Target, body: Json, raw: bytes, scope: Scope, client: Client, send: Send
    ) -> None:
        """Answer a request for `target`, to which its dialect fits."""
        if self._http is None:
            self._http = httpx.AsyncClient(follow_redirects=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64))
        exchange = _Exchange(self._http, self._log, self._refusals, caller, session, target, body, raw, scope, client, send)
        exchange.requests = self._requests.setdefault(session.session, Requests())
        task, gone = asyncio.create_task(exchange.run()), asyncio.create_task(client.gone())
        self._running.setdefault(session.session, set()).add(task)
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            task.cancel()  # its connection is closed with it
            await self._under_way.whatever_happens(session.session, self._conclude(exchange, task))
        if not task.cancelled():
            if (error := task.exception()) is not None:
                raise error
        elif not client.left:
            await exchange.refuse(Refusal(403, f"Session {session.session} is closed", code="session_closed"))

    async def _conclude(self, exchange: _Exchange, task: asyncio.Task[None]) -> None:
        await asyncio.wait({task})
        session = exchange.session.session
        running = self._running.get(session, set())
        running.discard(task)
        if not running:
            self._running.pop(session, None)
        try:
            delivered = await exchange.conclude()
        except CallLogError:
            logger.exception("session %s: what became of upstream call %s is not in the call log", session, exchange.call)
            delivered = False
        kind = "upstream" if exchange.kind == "agent" else exchange.kind
        self._index.upstream(session, exchange.call, kind, exchange.status, exchange.reply_class if delivered else None, time.time())


class _Exchange:
    """One request and what became of it."""

    requests: Requests

    def __init__(
        self,
        http: httpx.AsyncClient,
        log: CallLogWriter,
        refusals: Refusals,
        caller: Caller,
        session: Session,
        target: Target,
        body: Json,
        raw: bytes,
        scope: Scope,
        client: Client,
        send: Send,
    ) -> None:
        self._http, self._log, self._refusals, self._caller = http, log, refusals, caller
        self._target, self._body, self._raw, self._scope, self._client, self._send = target, body, raw, scope, client, send
        self._headers = Headers(scope=scope)
        self.session = session
        self.call = f"up-{uuid.uuid4().hex}"
        self.kind, self._conversation = kinds.classify(self._headers, body, side_model=False)
        self.status = "cancelled"
        self._http_status, self._error = 0, "the harness left, or the session was closed"
        self._reply: UpstreamReply | None = None
        self._opened, self._began = time.time(), time.monotonic()
        self._started = self._delivered = False
        self._recording: asyncio.Task[None] | None = None
        self._digest, self._bytes = hashlib.sha256(), 0
        self._first_byte_s: float | None = None
        self._last_byte_s: float | None = None

    @property
    def reply_class(self) -> str | None:
        """answer | tool_calls | length of a whole reply."""
        if self._reply is None or self.status not in ("finished", "length"):
            return None
        return "length" if self.status == "length" else "tool_calls" if self._reply.first.calls else "answer"

    async def run(self) -> None:
        """Ask the upstream and pass its answer on. Raises `StreamCut`."""
        dialect, settings = self._caller.dialect.name, self._target.settings
        request = self._http.build_request(
            "POST",
            self._target.url(dialect, self._scope.get("query_string", b"").decode("latin-1")),
            content=self._target.body(dialect, self._body, self._raw),
            headers=self._target.headers(self._headers, dialect),
            timeout=httpx.Timeout(settings.timeout_s, connect=min(CONNECT_S, settings.timeout_s), pool=None),
        )
        try:
            response = await self._http.send(request, stream=True)
            try:
                await self._pass_on(response)
            finally:
                await response.aclose()
        except httpx.TimeoutException:
            await self._no_answer(504, f"the server of model {self._asked!r} said nothing for {settings.timeout_s:g} s")
        except httpx.HTTPError as error:
            await self._no_answer(502, f"the server of model {self._asked!r} gave no answer ({_said(error)})")
        except CallLogError as error:
            logger.error("upstream call %s could not be recorded: %s", self.call, error)
            await self.refuse(Refusal(503, "The proxy cannot record calls: its disk is full or failing", code="server_error"))

    async def conclude(self) -> bool:
        """Write what is not written yet; whether the whole reply was delivered. Raises `CallLogError`."""
        if self._recording is None:
            self._record()
        assert self._recording is not None
        await self._recording
        event = {"event": "delivered" if self._delivered else "undelivered", "call": self.call, "session": self.session.session}
        report = {"response_sha256": self._digest.hexdigest(), "bytes": self._bytes, "status": self._http_status, "reply": self.reply_class}
        await self._log.append(event | {"t": time.time()} | report | {"first_byte_s": self._first_byte_s, "last_byte_s": self._last_byte_s})
        return self._delivered

    # ---- answers

    async def _pass_on(self, response: httpx.Response) -> None:
        self._http_status = response.status_code
        if 300 <= response.status_code < 400:
            raise httpx.RemoteProtocolError(f"a redirect, status {response.status_code}")
        headers = self._target.returned(response.headers.multi_items())
        if response.status_code >= 400:
            await self._pass_error(response, headers)
            return
        streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        reply = self._reply = READERS[self._caller.dialect.name](streamed)
        held = bytearray()
        if streamed:
            await self._start(headers)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as patience:
                try:
                    async for chunk in response.aiter_bytes():
                        reply.feed(chunk)
                        if streamed and not reply.ended:
                            await self._body_part(chunk)
                            continue
                        held += chunk
                        if streamed and patience.when() is None:
                            patience.reschedule(loop.time() + LINGER_S)
                except httpx.HTTPError:
                    if not (streamed and reply.ended):
                        raise
        reply.close()
        self.status = "length" if reply.cut else "finished" if reply.ended else "failed"
        self._error = "" if reply.ended else "the reply ended before its proper end"
        await self._recorded()
        if not streamed:
            await self._start(headers)
        await self._body_part(bytes(held), last=True)

    async def _pass_error(self, response: httpx.Response, headers: list[tuple[bytes, bytes]]) -> None:
        """The upstream's own error, status and body as they are but for a key in it."""
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > ERROR_BYTES:
                break
        shown = self._target.without_key(bytes(content))
        error = (parse_object(shown) or {}).get("error")
        message = error.get("message") if isinstance(error, dict) else None
        self.status, self._error = "failed", str(message or shown[:500].decode(errors="replace"))
        if response.status_code in (429, 503) and not any(name == b"retry-after" for name, _ in headers):
            headers.append((b"retry-after", str(RETRY_S).encode()))  # without it some clients give up at once
        await self._recorded()
        await self._start([*headers, (b"content-length", str(len(shown)).encode())])
        await self._body_part(shown, last=True)
        self._delivered = False  # of a reply

    async def _no_answer(self, status: int, message: str) -> None:
        logger.warning("upstream %s: %s", self._target.name, self._target.without_key(message.encode()).decode())
        self.status, self._http_status, self._error = "failed", status, message
        await self._recorded()
        if self._started:
            raise StreamCut(message)
        await self.refuse(Refusal(status, message, code="upstream_error", retry_after_s=RETRY_S))

    async def refuse(self, refusal: Refusal) -> None:
        """Answer in the upstream's place. Raises `StreamCut` where its answer has begun."""
        self._http_status = refusal.status
        if self._started:
            raise StreamCut(refusal.message)
        self._started = self._client.passed_on = True
        await self._refusals.respond(self._caller, refusal, self._scope, self._client.replay(b""), self._send)

    async def _start(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = self._client.passed_on = True
        await self._send({"type": "http.response.start", "status": self._http_status, "headers": headers})

    async def _body_part(self, chunk: bytes, *, last: bool = False) -> None:
        self._digest.update(chunk)
        self._bytes += len(chunk)
        if self._first_byte_s is None and chunk:
            self._first_byte_s = time.monotonic() - self._began
        there = not self._client.left
        await self._send({"type": "http.response.body", "body": chunk, "more_body": not last})
        if last:
            self._last_byte_s = time.monotonic() - self._began
            self._delivered = there and self.status in ("finished", "length")

    # ---- the record

    @property
    def _asked(self) -> str:
        return str(self._body.get("model"))

    async def _recorded(self) -> None:
        """The event is on disk. Raises `CallLogError`."""
        self._record()
        assert self._recording is not None
        await asyncio.shield(self._recording)

    def _record(self) -> None:
        # A task of its own: who waits for it may be cancelled, and it must not be written twice.
        if self._recording is None:
            self._recording = asyncio.create_task(self._append())

    async def _append(self) -> None:
        reply = self._reply
        others = [said.reply() for number, said in sorted(reply.said.items()) if number] if reply is not None else []
        event: dict[str, Any] = {
            "event": "upstream",
            "call": self.call,
            "session": self.session.session,
            "t": time.time(),
            "opened": self._opened,
            "purpose": self.session.purpose,
            "upstream": self._target.name,
            "model": self._asked,
            "dialect": self._caller.dialect.name,
            "path": self._caller.path,
            "streamed": bool(self._body.get("stream")),
            "kind": self.kind,
            "conversation": self._conversation,
            "request_sha256": hashlib.sha256(self._raw).hexdigest(),
            "status": self.status,
            "http_status": self._http_status,
            "error": self._target.without_key(self._error.encode(errors="replace")).decode() or None,
            "reply": reply.first.reply() if reply is not None else None,
            "others": others or None,
            "usage": reply.usage if reply is not None else None,
            "logprobs": reply.first.scores() if reply is not None else None,
        }
        requests = self.requests
        event |= requests.encode(self.call, self._body)
        try:
            json.dumps(event, allow_nan=False)
        except ValueError:
            event = _finite(event)
        written = False
        try:
            await self._log.append(event)
            written = True
        finally:
            requests.remember(self.call, written=written)


def _said(error: httpx.HTTPError) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _finite(value: Any) -> Any:
    """`value` without numbers that JSON has no words for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value
