"""The load generator: a process of its own, HTTP/1.1 over raw asyncio transports, the same for every server.

`python -m benchmarks.parts.load WORDS` reads one order a line from its standard input and answers each with a line of JSON. It keeps the
conversations: `sessions` of one size with one server, which every order about them carries on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.parts.conversation import Conversation, Words


class Refused(Exception):
    """A server answered something else than a whole reply."""


class Connection(asyncio.Protocol):
    """One keep-alive connection. One request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._waiting: asyncio.Future[None] | None = None
        self.closed = False
        self._clear()

    def _clear(self) -> None:
        self.buffer, self.head, self._length, self._chunked = bytearray(), 0, 0, False
        self.first = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer
        buffer += data
        if not self.head:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(buffer[: end + 2]).lower()
            self.head, self._chunked = end + 4, b"transfer-encoding: chunked" in head
            if not self._chunked:
                at = head.index(b"content-length:") + 15
                self._length = int(head[at : head.index(b"\r", at)])
        if not self.first and len(buffer) > self.head:
            self.first = time.perf_counter()
        whole = buffer.endswith(b"\r\n0\r\n\r\n") if self._chunked else len(buffer) >= self.head + self._length
        if whole and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._waiting is not None and not self._waiting.done():
            end = bytes(self.buffer[-300:])
            self._waiting.set_exception(Refused(f"closed after {len(self.buffer)} bytes ({error}), the last {end!r}"))

    async def ask(self, path: str, headers: str, body: bytes) -> None:
        """Send a request and wait for the whole response. Raises `Refused`."""
        self._clear()
        self._waiting = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        await self._waiting

    @property
    def status(self) -> int:
        return int(self.buffer[9:12])

    def content(self) -> bytes:
        """The response's body without its transfer coding."""
        rest = bytes(self.buffer[self.head :])
        if not self._chunked:
            return rest
        pieces = []
        while True:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            if not length:
                return b"".join(pieces)
            pieces.append(rest[:length])
            rest = rest[length + 2 :]

    def close(self) -> None:
        """Close at once: what is unread is dropped."""
        if self._transport is not None:
            self._transport.abort()


async def connect(base: str) -> Connection:
    """To the host and port of `base`."""
    url = urlsplit(base)
    _, connection = await asyncio.get_running_loop().create_connection(Connection, url.hostname or "127.0.0.1", url.port or 80)
    return connection


@dataclass
class Server:
    """One server's conversations of one size."""

    base: str
    paths: list[str]
    """Of each session."""
    headers: str
    conversations: list[Conversation]
    connections: list[Connection] = field(default_factory=list)


@dataclass
class Order:
    """A load: `calls` in all, `concurrency` at a time, spread evenly over the sessions."""

    server: str
    size: str
    streamed: bool
    concurrency: int
    calls: int


class Load:
    """All servers' conversations."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._servers: dict[tuple[str, str], Server] = {}

    def meet(self, name: str, size: str, base: str, paths: list[str], headers: str) -> None:
        """Begin conversations of `size` with the server `name`, one for each path."""
        talks = [Conversation(self._words, size, f"{size}-{at}") for at in range(len(paths))]
        self._servers[name, size] = Server(base, paths, headers, talks)

    async def run(self, order: Order) -> dict[str, list[float]]:
        """Seconds to the last and the first byte of every call. Raises `Refused`."""
        server = self._servers[order.server, order.size]
        # A server closes a connection that was idle for some seconds.
        server.connections = [connection for connection in server.connections if not connection.closed]
        while len(server.connections) < order.concurrency:
            server.connections.append(await connect(server.base))
        share = [range(at, len(server.paths), order.concurrency) for at in range(order.concurrency)]
        counts = [order.calls // order.concurrency + (at < order.calls % order.concurrency) for at in range(order.concurrency)]
        found: dict[str, list[float]] = {"latencies": [], "first": []}

        async def worker(connection: Connection, sessions: range, calls: int) -> None:
            for call in range(calls):
                at = min(sessions, key=lambda at: server.conversations[at].turns) if call or len(sessions) > 1 else sessions[0]
                conversation = server.conversations[at]
                body = conversation.body(order.streamed)
                began = time.perf_counter()
                await connection.ask(server.paths[at], server.headers, body)
                found["latencies"].append(time.perf_counter() - began)
                found["first"].append(connection.first - began)
                if connection.status != 200 or (order.streamed and b"[DONE]" not in connection.buffer[-40:]):
                    raise Refused(f"{bytes(connection.buffer[:600])!r}")
                conversation.answered()

        await asyncio.gather(*map(worker, server.connections, share, counts))
        return found


async def main() -> None:
    load = Load(Words(**json.loads(Path(sys.argv[1]).read_text())))
    orders = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        order = json.loads(line)
        try:
            answer: Any
            if "paths" in order:
                answer = load.meet(**order)
            else:
                answer = await load.run(Order(**order))
            print(json.dumps({"answer": answer}), flush=True)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}, at {order}"}), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
