"""What a replica learns of sessions from the calls that other replicas logged: predecessors that are gone, and those beside it.

Nothing is read before the replica is healthy. When it meets a session for the first time, and with every request that did not come by the
session's path (so that no affinity leads it here) while there are several replicas, it catches up with the files of the others and enters
what they say of that session into its index. Catching up looks at the heads of new lines only; a session's events are parsed when it is
met. All of that is done in threads, one at a time. Where nothing is new it costs listing a directory.

Memory: of a session that was closed some time ago only its name is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogError, CallLogReader, SessionState
from forge_ray.trajectories.call_log.segments import segments, writing

logger = logging.getLogger(__name__)

KEEP_S = 600.0
"""For how long after its last event a closed session is held: it may be closed again, by somebody who missed the first answer."""

_Found = tuple[list[Call], SessionState]


class Recovery:
    """The log of the other replicas in `directory`, for the index of this one. Used from the replica's event loop.

    `alone`: there is no other replica beside this one.
    """

    def __init__(self, index: SessionIndex, directory: Path, *, alone: bool) -> None:
        self._index, self._directory, self._alone = index, directory, alone
        self._reader = CallLogReader(directory, exclude=index.replica)
        self._met: set[str] = set()
        self._closed: set[str] = set()
        self._lock = asyncio.Lock()
        self._told = 0

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

    async def meet(self, session: str, *, by_path: bool) -> None:
        """Before a request of `session` is judged: enter what the others recorded of it. Raises `CallLogError`."""
        if self._index.closed(session) or (session in self._met and (by_path or self._alone)):
            return
        found: _Found | None = None
        async with self._lock:
            found = await asyncio.to_thread(self._look, session)
        if session in self._closed and found is None:
            self._index.restore(session, [], closed=True, limit=None)
            return
        self._enter(session, found)
        self._met.add(session)

    async def close(self, session: str) -> None:
        """Before `session` is closed and reported: enter what replicas recorded of it that cannot report any more.
        Raises `CallLogError`."""
        async with self._lock:
            found = await asyncio.to_thread(self._look_for_the_dead, session)
        self._enter(session, found)
        self._met.discard(session)

    def report(self) -> dict[str, object]:
        """For the replica's status: what is wrong in the log, as far as this replica has read it."""
        problems = self._reader.problems
        return {"log_problems": len(problems), "log_problem": str(problems[0]) if problems else None}

    def _enter(self, session: str, found: _Found | None) -> None:
        if found is not None:
            calls, state = found
            self._index.restore(
                session, calls, closed=state.closed, limit=state.limit, overflow=state.overflow, refused_by=state.refused_by
            )

    # ---- in threads, under the lock

    def _catch_up(self) -> None:
        self._reader.refresh()
        long_ago = time.time() - KEEP_S
        for session in self._reader.closed_before(long_ago):
            self._closed.add(session)
            self._reader.forget(session)
        for problem in self._reader.problems[self._told :]:
            logger.error("the call log is damaged: %s", problem)
        self._told = len(self._reader.problems)

    def _look(self, session: str) -> _Found | None:
        self._catch_up()
        return self._read(self._reader, session)

    def _look_for_the_dead(self, session: str) -> _Found | None:
        self._catch_up()
        if session in self._closed:  # closed once more: everything of it, out of all files
            everything = CallLogReader(self._directory)
            everything.refresh()
            return self._read(everything, session)
        live = writing([segment for segment in segments(self._directory) if segment.replica != self._index.replica])
        replicas = self._reader.replicas(session)
        if replicas and all(live.get(replica, False) for replica in replicas):
            return None  # each reports its own calls
        return self._read(self._reader, session)

    @staticmethod
    def _read(reader: CallLogReader, session: str) -> _Found | None:
        return (reader.session(session), reader.state(session)) if reader.knows(session) else None
