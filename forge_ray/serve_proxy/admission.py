"""Which requests may use the engine now: a limit of our own per replica, fair between sessions.

The engine serves its queue in the order of arrival, so a session with many parallel calls would hold up all others. Here at most
`max_running` requests are handed to it; the rest wait, one queue per session, and free places go round the sessions. A request has a
`Ticket` from its arrival to its end: it arrives (or is turned away with a 429, when too many wait), takes its turn once vLLM's app has read
and rendered it, and leaves, however it ended. While the weights are updated nobody's turn comes; a request that would wait longer than
`max_pause_s` for that is turned away with a 503.

All in one event loop. A client that goes away ends its request, whose ticket then leaves; `drop` turns away the waiting requests of a
session that was closed.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge_ray.config import Proxy
from forge_ray.errors import ForgeRayError

OVERCOMMIT = 1.25
"""Requests per sequence of the engine's batch, so that the next one is there when a place comes free."""
PAUSE_RETRY_S = 5
"""What a client is told to wait when a pause lasts too long, seconds."""
MAX_RETRY_S = 60
_SMOOTHING = 0.1


class NotAdmitted(ForgeRayError):
    """The request was turned away before the engine saw it."""

    status = 503
    code = "server_error"
    reason = "busy"
    """As the call log's `refused` event says it."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Busy(NotAdmitted):
    """Too many requests wait already."""

    status, code = 429, "rate_limit_exceeded"


class PausedTooLong(NotAdmitted):
    """The weight update under which the request waited took too long."""

    code, reason = "server_is_overloaded", "paused"


class SessionClosed(NotAdmitted):
    """The session was closed while the request waited."""

    status, code, reason = 403, "session_closed", "closed"


class LimitReached(NotAdmitted):
    """The session has used up a limit: `calls` or `tokens`."""

    status, code, reason = 400, "context_length_exceeded", "limit"


class Ticket:
    """One request's place. Made by `Admission.arrive`; `leave` must be called."""

    def __init__(self, admission: Admission, session: str) -> None:
        self.session = session
        self._admission = admission
        self._granted: asyncio.Future[None] | None = None
        self._since = 0.0
        self.running = self.gone = False

    async def turn(self) -> None:
        """Wait until the engine may be asked. Returns at once for a request whose turn it is already. Raises `NotAdmitted`."""
        admission = self._admission
        if self.running:
            return
        if self._granted is None:
            admission._check()
            if admission._free():
                admission._grant(self)
                return
            self._granted = asyncio.get_running_loop().create_future()
            admission._queue(self)
        try:
            await asyncio.shield(self._granted)
        finally:
            if self._granted.done():
                self._granted = None

    def _pass(self) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    def _fail(self, error: NotAdmitted) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_exception(error)
            self._granted.exception()  # whoever waited may be gone

    def stand_back(self) -> None:
        """Give the turn to others while this request waits for something else; `turn` queues again."""
        if self.running:
            self.running = False
            self._admission._release(None)

    def leave(self) -> None:
        """The request is over."""
        if self.gone:
            return
        self.gone = True
        self._admission._forget(self)
        if self.running:
            self.running = False
            self._admission._release(asyncio.get_running_loop().time() - self._since)


class Admission:
    """All requests of one replica. `max_running`: requests that the engine may have at once; `max_waiting`: those beyond; `max_pause_s`:
    longest wait for a weight update, seconds."""

    def __init__(self, max_running: int = 1 << 30, max_waiting: int = 0, max_pause_s: float = 60.0) -> None:
        self.max_running, self.max_waiting, self.max_pause_s = max_running, max_waiting, max_pause_s
        self._queues: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._tickets = self._running = 0
        self._pauses = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._expired = False
        self._seconds = 1.0
        """Smoothed time that a request holds its place."""

    @classmethod
    def of(cls, proxy: Proxy, slots: int) -> Admission:
        """As the config says; `slots`: sequences that the engine computes at once."""
        return cls(proxy.max_running or math.ceil(slots * OVERCOMMIT), proxy.max_waiting, proxy.max_pause_s)

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that have arrived and not had their turn."""
        return self._tickets - self._running

    def status(self) -> dict[str, Any]:
        """For the replica's status."""
        return {"running": self.running, "waiting": self.waiting, "max_running": self.max_running, "paused": self._pauses > 0}

    def arrive(self, session: str) -> Ticket:
        """A request comes in. Raises `Busy` when too many wait, `PausedTooLong` when a pause has gone on for too long."""
        self._check()
        if self._tickets >= self.max_running + self.max_waiting:
            retry = self._retry_after()
            raise Busy(f"{self.waiting} requests are waiting already", retry)
        self._tickets += 1
        return Ticket(self, session)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody's turn comes inside. An exception leaves it so: what failed half-way must not be asked again."""
        self.pause()
        yield
        self.resume()

    def pause(self) -> None:
        """Let no more requests through until as many `resume`s."""
        self._pauses += 1
        if self._pauses == 1:
            self._expiry = asyncio.get_running_loop().call_later(self.max_pause_s, self._expire)

    def resume(self) -> None:
        """End a pause."""
        self._pauses -= 1
        if self._pauses == 0:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry, self._expired = None, False
            self._fill()

    def drop(self, session: str) -> None:
        """The session is closed: its waiting requests are turned away."""
        for ticket in self._queues.pop(session, ()):
            ticket._fail(SessionClosed(f"Session {session} is closed"))

    # ---- what tickets do

    def _check(self) -> None:
        if self._expired:
            raise self._pause_error()

    def _free(self) -> bool:
        return self._pauses == 0 and self._running < self.max_running

    def _grant(self, ticket: Ticket) -> None:
        ticket.running = True
        ticket._since = asyncio.get_running_loop().time()
        self._running += 1

    def _queue(self, ticket: Ticket) -> None:
        self._queues.setdefault(ticket.session, deque()).append(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._tickets -= 1
        queue = self._queues.get(ticket.session)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._queues[ticket.session]

    def _release(self, seconds: float | None) -> None:
        self._running -= 1
        if seconds is not None:
            self._seconds += _SMOOTHING * (seconds - self._seconds)
        self._fill()

    def _fill(self) -> None:
        while self._queues and self._free():
            session, queue = next(iter(self._queues.items()))
            ticket = queue.popleft()
            if queue:
                self._queues.move_to_end(session)
            else:
                del self._queues[session]
            self._grant(ticket)
            ticket._pass()

    def _expire(self) -> None:
        self._expired = True
        queues, self._queues = self._queues, OrderedDict()
        for queue in queues.values():
            for ticket in queue:
                ticket._fail(self._pause_error())

    def _pause_error(self) -> PausedTooLong:
        return PausedTooLong(f"the policy's weights are being updated for more than {self.max_pause_s:g} s", PAUSE_RETRY_S)

    def _retry_after(self) -> int:
        """Seconds after which a place should be free: one request's time per round of the queue."""
        return min(MAX_RETRY_S, max(1, math.ceil(self._seconds * (self.waiting + 1) / self.max_running)))
