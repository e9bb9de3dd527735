"""One HTTP request of a client, from its first byte to its last: the plumbing below the edge's decisions.

`Client` reads the body and then watches for the client's leaving, whatever the app does; `Tee` passes a response on piece by piece
as it comes, and takes notes. Held back are only the body of an error, which has to be put into the dialect's words, and what the app says
before the engine has said anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from forge_ray.serve_proxy.dialects import Reply
from forge_ray.serve_proxy.identity import CallContext


class TooLarge(Exception):
    """The body is above the limit."""


class Gone(Exception):
    """The client left before its request was complete."""


class Client:
    """The client's half of an exchange."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = asyncio.Event()
        self.passed_on = False
        """An answer may have begun: what is raised from then on cuts it."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def left(self) -> bool:
        """The connection is gone."""
        return self._left.is_set()

    async def gone(self) -> None:
        """Wait until the connection is gone."""
        await self._left.wait()

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


class Answers(Protocol):
    """How an exchange is answered in the app's place."""

    async def error(self, status: int, content: bytes) -> int:
        """Send a whole response for the app's error (`status` and body); gives the status that was sent."""
        ...

    async def event(self, status: int) -> bytes:
        """The error as the last event of a stream that has begun."""
        ...


class Tee:
    """A `send` for the app that notes what went to the client.

    `make_reply(streamed)` gives the reader of a successful response; `answers` answers in place of one with an error status. `keep`: hold
    the whole response in `kept`.

    A stream is held back until the engine has given its first output (`context.begun`): until then the request may still turn out to be
    one that must be refused, with a status of its own. `keep_alive` lets the headers go earlier; an error after that is the stream's last
    event.
    """

    def __init__(
        self,
        client: Client,
        send: Send,
        make_reply: Callable[[bool], Reply],
        answers: Answers,
        *,
        context: CallContext | None = None,
        comment: bytes = b"",
        keep: bool = False,
    ) -> None:
        self._client, self._send, self._make_reply = client, send, make_reply
        self._answers, self._context, self._comment, self._keep = answers, context, comment, keep
        self._began = self._spoke = time.monotonic()
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
        self._held: list[Message] = []
        self._lock = asyncio.Lock()

    @property
    def response_sha256(self) -> str:
        return self._digest.hexdigest()

    @property
    def delivered(self) -> bool:
        """The client was there to the end of a successful response that came to its proper end."""
        return self._handed_over and self.reply is not None and self.reply.complete

    @property
    def begun(self) -> bool:
        """A part of the reply itself has gone to the client."""
        return self.started and (self._context is None or self._context.begun)

    @property
    def _streamed(self) -> bool:
        return self.reply is not None and self.reply.streamed

    @property
    def _spoiled(self) -> bool:
        """The engine was not asked, or failed: what the app makes of that is not what the client gets."""
        context = self._context
        return context is not None and (context.refusal is not None or (context.failed is not None and not context.begun))

    async def send(self, message: Message) -> None:
        """The app's `send`."""
        if self._in_the_middle(message):
            # A whole event: a keep-alive may come before or after it, so nothing need be locked.
            chunk = message.get("body", b"")
            self._note(chunk)
            if self.reply is not None:
                self.reply.feed(chunk, False)
            await self._send(message)
            return
        async with self._lock:
            await self._take(message)

    def _in_the_middle(self, message: Message) -> bool:
        """Whether this is a further piece of a stream that needs no thought: nearly all messages are."""
        return (
            self.first_byte_s is not None
            and message.get("more_body", False)
            and not self._held
            and not self.ended
            and self.reply is not None
            and (self._context is None or (self._context.begun and self._context.refusal is None))
            and not self._lock.locked()
        )

    async def _take(self, message: Message) -> None:
        if self.ended:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400:
                return
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            self.reply = self._make_reply(kind.startswith("text/event-stream"))
            if self._context is not None:
                self.reply.issued = self._context.issued
            self._held.append(message)
            if self._context is None or self._context.begun:
                await self._flush()
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self.reply is None:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._instead(self.status, bytes(self._error))
        elif self._spoiled:
            await self._instead(500, b"")
        else:
            self._held.append(message)
            last = not message.get("more_body", False)
            if self.started or last or self._context is None or self._context.begun:
                await self._flush()

    async def fail(self, status: int) -> None:
        """Answer an error of our own in the app's place, or as the last event of a stream that has begun."""
        async with self._lock:
            if not self.ended:
                await self._instead(status, b"")

    def silent_since(self) -> float | None:
        """See `keepalive.Stream`."""
        if self.ended or not self._streamed or self._lock.locked() or self._client.left:
            return None
        return self._spoke

    async def keep_alive(self) -> None:
        """Send the headers, if they have not gone yet, and a comment. vLLM's app sends whole events, so this is never inside of one."""
        async with self._lock:
            if self.ended or not self._streamed or self._spoiled:
                return
            await self._flush()
            self._note(self._comment)
            await self._send({"type": "http.response.body", "body": self._comment, "more_body": True})

    async def _flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._spoke = time.monotonic()
            if message["type"] == "http.response.start":
                self.started = True
                await self._send(message)
            else:
                await self._body(message)

    async def _instead(self, status: int, content: bytes) -> None:
        """The client gets an error in place of what the app sends."""
        self._held.clear()
        if self.started:
            event = await self._answers.event(status)
            self._note(event)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            self.started, self.reply = True, None
            self.status = await self._answers.error(status, content)
        self.ended = True

    def _note(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.bytes += len(chunk)
        self._spoke = time.monotonic()
        if self._keep:
            self.kept += chunk

    async def _body(self, message: Message) -> None:
        assert self.reply is not None
        chunk, last = message.get("body", b""), not message.get("more_body", False)
        if chunk:
            self._note(chunk)
            if self.first_byte_s is None:
                self.first_byte_s = time.monotonic() - self._began
        self.reply.feed(chunk, last)
        if not last:
            await self._send(message)
            return
        there = not self._client.left  # a server reports the end of an exchange as a disconnect too, but only afterwards
        await self._send(message)
        self.last_byte_s = time.monotonic() - self._began
        self._handed_over, self.ended = there, True


def inner_scope(scope: Scope, path: str, body: bytes) -> Scope:
    """`scope` for the app: the path inside the session's prefix, and of the headers those that fit `body`. None of the client's: vLLM takes
    a request's id, priority and place in the engine from some."""
    root = scope.get("root_path", "")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    # With a newer version of the protocol Starlette does not listen for the client's leaving while it streams.
    asgi = {**scope.get("asgi", {"version": "3.0"}), "spec_version": "2.3"}
    return {**scope, "asgi": asgi, "path": f"{root}{path}", "raw_path": f"{root}{path}".encode(), "headers": headers}
