"""Which sessions have requests under way: from a request's arrival until all its events are on disk."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any


class UnderWay:
    """The requests of one edge, by session."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._concluding: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        """Whether there is any, its last events included."""
        return bool(self._live or self._concluding)

    def count(self, session: str) -> int:
        """Requests of `session`."""
        return self._live[session]

    async def drained(self, session: str, timeout_s: float) -> bool:
        """Wait until there is none of `session`. False after `timeout_s`."""
        if not self._live[session]:
            return True
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session, []).append(idle)
        done, _ = await asyncio.wait([idle], timeout=timeout_s)
        return bool(done)

    def enter(self, session: str) -> None:
        """One more."""
        self._live[session] += 1

    def leave(self, session: str) -> None:
        """One less."""
        self._live[session] -= 1
        if not self._live[session]:
            del self._live[session]
            for idle in self._waiting.pop(session, ()):
                if not idle.done():
                    idle.set_result(None)

    async def whatever_happens(self, session: str, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`, which goes on although this request is cancelled; the session is under way until it is done."""
        self.enter(session)
        task = asyncio.create_task(work)
        self._concluding.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._concluding.discard(task)
            self.leave(session)

        task.add_done_callback(done)
        await asyncio.shield(task)
