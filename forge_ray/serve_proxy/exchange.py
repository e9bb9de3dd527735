"""One HTTP request of a client, from its first byte to its last: the plumbing below the edge's decisions.

`Client` reads the body and then watches for the client's leaving, whatever the app does; `Tee` passes a response on piece by piece
as it comes, and takes notes. Nothing is held back, except the body of an error, which has to be put into the dialect's words.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from forge_ray.serve_proxy.dialects import Reply


class TooLarge(Exception):
    """The body is above the limit."""


class Gone(Exception):
    """The client left before its request was complete."""


class Client:
    """The client's half of an exchange."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def left(self) -> bool:
        """The connection is gone."""
        return self._left.is_set()

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises `TooLarge` as soon as it is above `limit` bytes, `Gone` when the client left."""
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left.set()
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise TooLarge
            parts.append(part)
            if not message.get("more_body", False):
                break
        self._watch = asyncio.create_task(self._wait_for_leaving())
        return b"".join(parts)

    async def _wait_for_leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left.set()

    def replay(self, body: bytes) -> Receive:
        """A `receive` for the app: `body` at once, then the client's leaving when it comes."""
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self._left.wait()
            return {"type": "http.disconnect"}

        return receive

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.cancel()


class Tee:
    """A `send` for the app that notes what went to the client.

    `make_reply(streamed)` gives the reader of a successful response; `on_error(status, body)` answers in place of one with an error
    status. `keep`: hold the whole response in `kept`.
    """

    def __init__(
        self,
        client: Client,
        send: Send,
        make_reply: Callable[[bool], Reply],
        on_error: Callable[[int, bytes], Awaitable[None]],
        *,
        keep: bool = False,
    ) -> None:
        self._client, self._send, self._make_reply = client, send, make_reply
        self._on_error, self._keep = on_error, keep
        self._began = time.monotonic()
        self._digest, self._error = hashlib.sha256(), bytearray()
        self.status = 0
        """HTTP status of the app's response; 0 before there is one."""
        self.started = self.ended = False
        """Something has, everything has gone to the client."""
        self.reply: Reply | None = None
        """None until a successful response starts."""
        self.bytes = 0
        self.first_byte_s: float | None = None
        self.last_byte_s: float | None = None
        self.kept = bytearray()
        self._handed_over = False

    @property
    def response_sha256(self) -> str:
        return self._digest.hexdigest()

    @property
    def delivered(self) -> bool:
        """The client was there to the end of a successful response that came to its proper end."""
        return self._handed_over and self.reply is not None and self.reply.complete

    async def send(self, message: Message) -> None:
        """The app's `send`."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400:
                return
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            self.reply = self._make_reply(kind.startswith("text/event-stream"))
            self.started = True
            await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self.reply is None:
            await self._error_body(message)
        else:
            await self._body(message, self.reply)

    async def fail(self, status: int) -> None:
        """Answer an error of our own, where the app has sent nothing."""
        self.status, self.started = status, True
        await self._on_error(status, b"")
        self.ended = True

    async def _error_body(self, message: Message) -> None:
        self._error += message.get("body", b"")
        if not message.get("more_body", False):
            self.started = True
            await self._on_error(self.status, bytes(self._error))
            self.ended = True

    async def _body(self, message: Message, reply: Reply) -> None:
        chunk, last = message.get("body", b""), not message.get("more_body", False)
        if chunk:
            self._digest.update(chunk)
            self.bytes += len(chunk)
            if self._keep:
                self.kept += chunk
            if self.first_byte_s is None:
                self.first_byte_s = time.monotonic() - self._began
        reply.feed(chunk, last)
        if not last:
            await self._send(message)
            return
        there = not self._client.left  # a server reports the end of an exchange as a disconnect too, but only afterwards
        await self._send(message)
        self.last_byte_s = time.monotonic() - self._began
        self._handed_over, self.ended = there, True


def inner_scope(scope: Scope, path: str, body: bytes) -> Scope:
    """`scope` for the app: the path inside the session's prefix, headers that fit `body`, and no request id of the client's."""
    root = scope.get("root_path", "")
    dropped = (b"content-length", b"transfer-encoding", b"content-type", b"x-request-id")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in dropped]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    # With a newer version of the protocol Starlette does not listen for the client's leaving while it streams.
    asgi = {**scope.get("asgi", {"version": "3.0"}), "spec_version": "2.3"}
    return {**scope, "asgi": asgi, "path": f"{root}{path}", "raw_path": f"{root}{path}".encode(), "headers": headers}
