"""Keeps the silent streams of a replica alive.

A client's stall detector fires when a stream says nothing for long: while the request waits for its turn or for a weight update, or while
a tool parser holds the text back. One task per replica looks at all streams and has those speak that were silent for `period_s`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

logger = logging.getLogger(__name__)


class Stream(Protocol):
    """What is kept alive."""

    def silent_since(self) -> float | None:
        """`time.monotonic()` of the last byte, or of the start; None where nothing may be sent."""

    async def keep_alive(self) -> None:
        """Send something that means nothing."""


class Pulse:
    """All streams of one event loop. `period_s`: longest silence, to a quarter; 0 = none is kept alive."""

    def __init__(self, period_s: float) -> None:
        self._period = period_s
        self._streams: set[Stream] = set()
        self._task: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    def add(self, stream: Stream) -> None:
        """Watch a stream until `remove`."""
        if not self._period:
            return
        self._streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())

    def remove(self, stream: Stream) -> None:
        """The stream has ended."""
        self._streams.discard(stream)

    async def _watch(self) -> None:
        while self._streams:
            await asyncio.sleep(self._period / 4)
            now = time.monotonic()
            for stream in tuple(self._streams):
                since = stream.silent_since()
                if since is not None and now - since >= self._period * 3 / 4:
                    # A task each: a client that reads slowly must not hold up the others.
                    task = asyncio.create_task(stream.keep_alive())
                    self._sending.add(task)
                    task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a keep-alive could not be sent: %r", error)
