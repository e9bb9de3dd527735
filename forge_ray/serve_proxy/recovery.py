"""What a replica learns of sessions from the calls that other replicas logged: predecessors that are gone, and those beside it.

Nothing is read before the replica is healthy. When it meets a session for the first time, and, where it has replicas beside it, with every
request (its own files apart, a request may come without affinity, or come back after another replica stood in), it catches up with the
files of the others and enters what they say of that session into its index. Catching up looks at the heads of new lines only; a session's
events are parsed when there is something new of it. That is done in a thread, for all requests at once that came meanwhile. Where nothing
is new it costs listing a directory.

Memory: of a session that was closed some time ago only its name is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogError, CallLogReader, Problem, SessionState
from forge_ray.trajectories.call_log.segments import segments, writing

logger = logging.getLogger(__name__)

KEEP_S = 600.0
"""For how long after its last event a closed session is held: it may be closed again, by somebody who missed the first answer."""

_Found = tuple[list[Call], SessionState]


class Recovery:
    """The log of the other replicas in `directory`, for the index of this one. Used from the replica's event loop.

    `alone`: no other replica serves beside this one.
    """

    def __init__(self, index: SessionIndex, directory: Path, *, alone: bool) -> None:
        self._index, self._directory, self._alone = index, directory, alone
        # Beside others, calls of theirs go on from calls of this replica; prompts cannot be rebuilt without these.
        self._reader = CallLogReader(directory, exclude=index.replica if alone else None)
        self._met: set[str] = set()
        self._entered: dict[str, tuple[int, int]] = {}
        """How much of what others logged of a session is in the index: events in JSONL, Parquet parts."""
        self._closed: set[str] = set()
        self._lock = asyncio.Lock()
        self._asking: dict[str, asyncio.Future[None]] = {}
        """Sessions of the requests that wait for the next look."""
        self._looking: asyncio.Task[None] | None = None
        self._told: set[Problem] = set()

    async def start(self) -> None:
        """Catch up with the log and say what is wrong in it, so that the first session need not wait for that."""
        async with self._lock:
            try:
                await asyncio.to_thread(self._catch_up)
                torn = await asyncio.to_thread(self._reader.torn)
            except CallLogError as error:
                logger.error("%s", error)
                return
        if torn:
            logger.warning("%d file(s) of the call log end in an event that was never whole: %s", len(torn), "; ".join(map(str, torn[:5])))

    async def meet(self, session: str) -> None:
        """Before a request of `session` is judged: enter what the others recorded of it. Raises `CallLogError`."""
        if self._index.closed(session) or (self._alone and session in self._met):
            return
        waiting = self._asking.get(session)
        if waiting is None:
            waiting = self._asking[session] = asyncio.get_running_loop().create_future()
            if self._looking is None:
                self._looking = asyncio.create_task(self._look_for_all())
        await asyncio.shield(waiting)

    async def _look_for_all(self) -> None:
        """Look until nobody asks. Whoever asks while a look is under way is served by the next one: its lines may have been passed."""
        try:
            while self._asking:
                asked, self._asking = self._asking, {}
                try:
                    async with self._lock:
                        found = await asyncio.to_thread(self._look, list(asked))
                    for session in asked:
                        self._enter(session, found.get(session))
                        self._met.add(session)
                except Exception as error:
                    logger.exception("sessions %s: what other replicas recorded cannot be read", list(asked)[:5])
                    _settle(asked.values(), error if isinstance(error, CallLogError) else CallLogError(repr(error)))
                else:
                    _settle(asked.values(), None)
        finally:
            self._looking = None

    async def close(self, session: str) -> None:
        """Before `session` is closed and reported: enter what replicas recorded that cannot report any more. Raises `CallLogError`."""
        async with self._lock:
            found = await asyncio.to_thread(self._look_for_the_dead, session)
        self._enter(session, found)
        self._met.discard(session)
        self._entered.pop(session, None)

    def report(self) -> dict[str, object]:
        """For the replica's status: what is wrong in the log, as far as this replica has read it."""
        problems = self._reader.problems
        return {"log_problems": len(problems), "log_problem": str(problems[0]) if problems else None}

    def _enter(self, session: str, found: _Found | None) -> None:
        if found is not None:
            calls, state = found
            self._index.restore(
                session,
                calls,
                closed=state.closed,
                limit=state.limit,
                overflow=state.overflow,
                refused_by=state.refused_by,
                upstream=state.upstream,
            )

    # ---- in threads, under the lock

    def _catch_up(self) -> None:
        self._reader.refresh()
        long_ago = time.time() - KEEP_S
        for session in self._reader.closed_before(long_ago):
            self._closed.add(session)
            self._reader.forget(session)
        for problem in self._reader.problems:
            if problem not in self._told:
                self._told.add(problem)
                logger.error("the call log is damaged: %s", problem)

    def _look(self, sessions: list[str]) -> dict[str, _Found]:
        self._catch_up()
        found = {}
        for session in sessions:
            if session in self._closed:
                found[session] = ([], SessionState(session, closed=True))
            elif self._entered.get(session, (0, 0)) != (much := self._much(session)):
                found[session] = self._read(self._reader, session)
                self._entered[session] = much
        return found

    def _much(self, session: str) -> tuple[int, int]:
        others = sum(count for replica, count in self._reader.replicas(session).items() if replica != self._index.replica)
        return others, self._reader.parts(session)

    def _look_for_the_dead(self, session: str) -> _Found | None:
        live = writing(segments(self._directory))  # first: what a dead replica has written is there by now
        self._catch_up()
        if session in self._closed or self._index.gone(session):  # closed once more: everything of it, out of all files
            everything = CallLogReader(self._directory)
            everything.refresh()
            return self._read(everything, session) if everything.knows(session) else None
        if not any(self._much(session)):
            return None
        replicas = self._reader.replicas(session).keys() - {self._index.replica}
        if replicas and all(live.get(replica, False) for replica in replicas):
            return None  # each reports its own calls
        return self._read(self._reader, session)

    @staticmethod
    def _read(reader: CallLogReader, session: str) -> _Found:
        return reader.session(session), reader.state(session)


def _settle(waiting: Iterable[asyncio.Future[None]], error: CallLogError | None) -> None:
    for future in waiting:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # nobody may be left that asks for it
