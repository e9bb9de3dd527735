"""A client's leaving, put as ASGI puts it.

When a client goes away Serve cancels the task that runs the app. vLLM's handlers of unstreamed requests wait for a task of their own,
which such a cancellation does not reach, so the engine would go on to the last token. This wrapper keeps the cancellation to itself: the
app receives `http.disconnect` and ends the engine's request in its own way; what it still sends is dropped.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

GRACE_S = 10.0
"""Time for the app to end after the client has gone, before it is cancelled."""


class Disconnects:
    """ASGI wrapper for an app that ends by itself on `http.disconnect`."""

    def __init__(self, app: ASGIApp, grace_s: float = GRACE_S) -> None:
        self._app, self._grace = app, grace_s
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone = asyncio.Event()
        waits: set[asyncio.Future[Message]] = set()

        async def receive_or_gone() -> Message:
            if gone.is_set():
                return {"type": "http.disconnect"}
            message = asyncio.ensure_future(receive())
            waits.add(message)
            try:
                return await message
            except asyncio.CancelledError:
                if not gone.is_set():
                    raise
                return {"type": "http.disconnect"}
            finally:
                waits.discard(message)

        async def send_while_there(message: Message) -> None:
            if not gone.is_set():
                await send(message)

        # By this version of ASGI a streaming response listens for the disconnect; by later ones it waits for `send` to fail.
        scope = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        task = asyncio.ensure_future(self._app(scope, receive_or_gone, send_while_there))
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            gone.set()
            for wait in waits:
                wait.cancel()
            _, late = await asyncio.wait({task}, timeout=self._grace)
            if late:
                task.cancel()
            raise

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # what the app raises towards a client that is gone concerns nobody
