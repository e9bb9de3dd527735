"""An HTTP server in the way of the requests: it passes each on to a source of answers, breaks those it is told to, and keeps a journal.

Between a program and our proxy the source is the proxy (`Forward`); behind another proxy it is the script (`upstream.Upstream`). Faults are
counted over the requests for a completion that hold the fault's mark, so that one door can serve several programs at a time. A program that
goes away takes its request at the source with it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from aiohttp import web
from yarl import URL

from forge_ray.conformance import dialects
from forge_ray.conformance.dialects.base import Wire

FaultKind = Literal["429", "429-retry-after", "500", "reset", "cut"]
MAX_BODY = 256 * 2**20
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length", "proxy-connection"}


@dataclass(frozen=True)
class Fault:
    """What goes wrong with some requests of one conversation."""

    kind: FaultKind
    of: str
    """Text that a request must hold to count."""
    at: int = 0
    """The first of them that is hit, from 0."""
    times: int = 1
    """How many in a row."""


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer; what a source gives first."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Exchange:
    """One request as it passed."""

    method: str
    path: str
    dialect: str | None
    """None: not a request for a completion."""
    body: bytes
    fault: str | None = None
    status: int | None = None
    """None: no answer was begun."""
    whole: bool = False
    """The answer was handed over to its end."""


Source = Callable[[web.Request, bytes], AsyncGenerator[Head | bytes, None]]


class Forward:
    """A source that asks another server. `target`: its URL without a slash at the end."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, request: web.Request, body: bytes) -> AsyncGenerator[Head | bytes, None]:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, trust_env=False)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = URL(self.target + request.raw_path, encoded=True)
        skip = {"User-Agent", "Accept", "Accept-Encoding", "Content-Type"}  # the program's own or none
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False, skip_auto_headers=skip
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            yield Head(answer.status, kept)
            async for chunk in answer.content.iter_any():
                yield chunk

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class Door:
    """Serves on a port of this machine between `start` and `stop`."""

    def __init__(self, source: Source, faults: Sequence[Fault] = (), port: int = 0) -> None:
        self.source, self.faults, self.port = source, list(faults), port
        self.journal: list[Exchange] = []
        self._seen: Counter[Fault] = Counter()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> Door:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        if not self.port:
            server: Any = site._server
            self.port = server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if isinstance(self.source, Forward):
            await self.source.close()

    def completions(self) -> list[Exchange]:
        """The requests for a completion so far, in the order of arrival."""
        return [exchange for exchange in self.journal if exchange.dialect is not None]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        wire = dialects.of(request.path) if request.method == "POST" else None
        exchange = Exchange(request.method, request.path_qs, wire.name if wire else None, body)
        self.journal.append(exchange)
        fault = self._next_fault(body) if wire else None
        exchange.fault = fault
        if wire is not None and fault in ("429", "429-retry-after", "500"):
            return self._refuse(wire, fault, exchange)
        async with aclosing(self.source(request, body)) as answer:
            try:
                head = await anext(answer)
            except aiohttp.ClientConnectorError as error:
                exchange.status = 502
                return web.json_response({"error": {"message": f"the proxy does not answer: {error!r}"}}, status=502)
            except (aiohttp.ClientError, OSError):  # the source broke off, so do we
                _reset(request)
                return web.Response()
            assert isinstance(head, Head)
            exchange.status = head.status
            if fault == "reset":
                _reset(request)
                return web.Response()
            return await self._pass(request, head, answer, exchange, wire.cut_events if wire is not None and fault == "cut" else None)

    async def _pass(
        self, request: web.Request, head: Head, answer: AsyncGenerator[Head | bytes, None], exchange: Exchange, cut: int | None
    ) -> web.StreamResponse:
        """`cut`: events after which the answer breaks off."""
        response = web.StreamResponse(status=head.status)
        for name, value in head.headers.items():
            response.headers[name] = value
        streamed = "event-stream" in head.headers.get("content-type", head.headers.get("Content-Type", ""))
        await response.prepare(request)
        held, events = b"", 0
        try:
            async for chunk in answer:
                assert isinstance(chunk, bytes)
                if cut is None:
                    await response.write(chunk)
                    continue
                # The last piece is held back: a cut answer never has its end.
                if streamed and held:
                    await response.write(held)
                    held = b""
                    if events >= cut:
                        break
                held += chunk
                events += chunk.count(b"\n\n")
            if cut is None:
                await response.write_eof()
                exchange.whole = True
                return response
            if not streamed:
                await response.write(held[: len(held) // 2])
        except (aiohttp.ClientError, OSError):  # the source broke off, so do we; or the program has left
            pass
        await _abort(request)
        return response

    def _refuse(self, wire: Wire, fault: str, exchange: Exchange) -> web.Response:
        status = 500 if fault == "500" else 429
        message = "The server had an error" if status == 500 else "Rate limit reached"
        headers = {"retry-after": "1"} if fault == "429-retry-after" else {}
        exchange.status, exchange.whole = status, True
        return web.json_response(wire.error(status, message), status=status, headers=headers)

    def _next_fault(self, body: bytes) -> FaultKind | None:
        hit = None
        for fault in self.faults:
            if fault.of.encode() in body:
                number = self._seen[fault]
                self._seen[fault] += 1
                if fault.at <= number < fault.at + fault.times:
                    hit = fault.kind
        return hit


def _reset(request: web.Request) -> None:
    """Close the connection with a reset."""
    transport = request.transport
    if transport is not None:
        connection = transport.get_extra_info("socket")
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


async def _abort(request: web.Request) -> None:
    """Close the connection without the body's end, which aiohttp would write once the handler returns."""
    await asyncio.sleep(0.05)  # what was written goes out first
    if request.transport is not None:
        request.transport.abort()
