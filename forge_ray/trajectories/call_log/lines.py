"""Which line of which file belongs to which session: an index over the JSONL segments that follows them as they grow.

Only the first bytes of a line are looked at, a line costs a few dozen bytes of memory, and what a session's lines say is parsed when
somebody asks for that session. So a replica that starts, or that meets a session of another replica, does not have to understand the
whole run's log first.

A line without its newline does not exist yet. A line that names neither a session nor a call puts into quarantine every session that
was under way in that replica: nobody can know whose event it was. Such a line, and a file that shrank, is a `Problem`; reading goes on.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from forge_ray.trajectories.call import END_EVENTS
from forge_ray.trajectories.call_log.errors import CallLogError
from forge_ray.trajectories.call_log.events import DELIVERIES, EVENTS, FORMER
from forge_ray.trajectories.call_log.problems import Problem
from forge_ray.trajectories.call_log.segments import Segment, segments

_HEAD = re.compile(rb'\{"event": ?"(\w+)", ?(?:"call": ?"([^"\\]+)"(?:, ?"session": ?"([^"\\]*)")?|"session": ?"([^"\\]*)")')
_TIME = re.compile(rb'"t": ?(\d+(?:\.\d+)?(?:e[+-]?\d+)?)[,}]')
_LOOK = 600
"""Bytes at a line's start in which the time of its event is looked for."""


class Line(NamedTuple):
    """Where one event is."""

    segment: Segment
    number: int
    """Counted from 1."""
    offset: int
    length: int


@dataclass(slots=True)
class Known:
    """What the heads of a session's lines say."""

    places: array[int] = field(default_factory=lambda: array("q"))
    """Segment, line number, offset, length of each of its lines, in the order in which they were read."""
    calls: list[str] = field(default_factory=list)
    running: dict[str, str] = field(default_factory=dict)
    """Calls without an end event, with their replica."""
    unreported: set[str] = field(default_factory=set)
    """Calls of which it is not known whether their reply arrived."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Lines by replica."""
    closed: bool = False
    last: float = 0.0
    """Unix seconds of the newest event."""


class Lines:
    """Index of every segment in `directory`, but for those of the replica `exclude`."""

    def __init__(self, directory: Path, exclude: str | None = None) -> None:
        self.directory, self.exclude = directory, exclude
        self.sessions: dict[str, Known] = {}
        self.quarantined: dict[str, Problem] = {}
        self.problems: list[Problem] = []
        self.read: dict[Segment, tuple[int, int]] = {}
        """Bytes and lines that were taken in of each segment, deleted ones included."""
        self.present: list[Segment] = []
        """The segments that were there at the last refresh."""
        self.sessions_of: dict[str, str] = {}
        """Session by call."""
        self.orphans: dict[str, list[tuple[str, Line]]] = {}
        """Events (name, place) of calls whose open event has not been read: it is in a file that is read later, or in a Parquet part."""
        self.taken = 0
        """Lines read so far."""
        self._segments: list[Segment] = []
        self._numbers: dict[Segment, int] = {}
        self._forgotten: set[str] = set()
        self._late: set[str] = set()
        """Calls of forgotten sessions of which more may be logged."""

    def refresh(self) -> None:
        """Take in every complete new line. Raises `CallLogError` where a file cannot be read."""
        self.present = [segment for segment in segments(self.directory) if segment.replica != self.exclude]
        for segment in self.present:
            try:
                self._follow(segment)
            except FileNotFoundError:
                continue  # compacted and deleted a moment ago
            except OSError as error:
                raise CallLogError(f"{segment.path}: cannot be read ({error})") from error

    def lines(self, known: Known) -> Iterator[Line]:
        """The places of a session's lines in the order in which they were read."""
        places = known.places
        for at in range(0, len(places), 4):
            yield Line(self._segments[places[at]], places[at + 1], places[at + 2], places[at + 3])

    def forget(self, session: str) -> None:
        """Drop what is known of `session` and ignore whatever is logged of it later."""
        self._forgotten.add(session)
        known = self.sessions.get(session)
        if known is not None:
            self._late |= known.unreported
        self.drop(session)

    def drop(self, session: str) -> None:
        """Drop what is known of `session`; later lines of it are taken in as if it was new (and as orphans, if they name only a call)."""
        known = self.sessions.pop(session, None)
        for call in known.calls if known is not None else ():
            self.sessions_of.pop(call, None)

    def adopt(self, call: str, session: str) -> None:
        """Enter the orphaned events of `call` as ones of `session`."""
        for name, place in self.orphans.pop(call):
            self._enter(session, name, call, place, b"")

    def forgotten(self, session: str) -> bool:
        return session in self._forgotten

    def quarantine(self, sessions: Iterable[str], file: Path, line: int, what: str) -> Problem:
        """Note a problem that makes `sessions` unfit for training."""
        problem = Problem(file, line, what, tuple(sessions))
        self.problems.append(problem)
        for session in problem.sessions:
            self.quarantined.setdefault(session, problem)
        return problem

    # ---- reading

    def _follow(self, segment: Segment) -> None:
        offset, number = self.read.get(segment, (0, 0))
        size = os.stat(segment.path).st_size
        if size < offset:
            what = f"the file shrank from {offset} to {size} bytes"
            self.quarantine(self._under_way(segment.replica), segment.path, 0, what)
            self.read[segment] = (size, number)
            return
        if size == offset and segment in self.read:
            return
        if segment not in self._numbers:
            self._numbers[segment] = len(self._segments)
            self._segments.append(segment)
            self.read[segment] = (0, 0)
        with segment.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._take(Line(segment, number + 1, offset, len(line)), line)
                offset, number = offset + len(line), number + 1
                self.read[segment] = (offset, number)

    def _take(self, at: Line, line: bytes) -> None:
        self.taken += 1
        match = _HEAD.match(line)
        named = (
            [part.decode(errors="replace") if part is not None else None for part in match.groups()] if match is not None else [None] * 4
        )
        event, call, session = named[0], named[1], named[2] if named[2] is not None else named[3]
        if match is None or not line.endswith(b"}\n"):
            try:
                value: dict[str, Any] = json.loads(line)
                event, call, session = value["event"], value.get("call"), value.get("session")
            except (ValueError, TypeError, KeyError, AttributeError):
                whose = session or self.sessions_of.get(call or "")
                sessions = [whose] if whose is not None else self._under_way(at.segment.replica)
                self.quarantine(sessions, at.segment.path, at.number, "no event of a call log")
                return
        if event in FORMER:
            return
        if event not in EVENTS or not isinstance(session if call is None else call, str):
            sessions = [session] if isinstance(session, str) else self._under_way(at.segment.replica)
            self.quarantine(sessions, at.segment.path, at.number, f"no event of a call log ({event!r} of call {call!r})")
            return
        if session is None:
            assert call is not None
            session = self.sessions_of.get(call)
        if session is None:
            self._orphan(event, str(call), at)
        elif session not in self._forgotten:
            self._enter(session, event, call, at, line)
        elif event == "open" and call is not None:
            self._late.add(call)

    def _orphan(self, event: str, call: str, at: Line) -> None:
        if call not in self._late:
            self.orphans.setdefault(call, []).append((event, at))
        elif event in DELIVERIES:
            self._late.discard(call)

    def _enter(self, session: str, event: str, call: str | None, at: Line, line: bytes) -> None:
        known = self.sessions.get(session)
        if known is None:
            known = self.sessions[session] = Known()
        known.places.extend((self._numbers[at.segment], at.number, at.offset, at.length))
        known.replicas[at.segment.replica] = known.replicas.get(at.segment.replica, 0) + 1
        if (found := _TIME.search(line[:_LOOK])) is not None:
            known.last = max(known.last, float(found[1]))
        if event == "session":
            known.closed = known.closed or b'"closed"' in line
        elif event == "open" and call is not None and call not in self.sessions_of:
            self.sessions_of[call] = session
            known.calls.append(call)
            known.running[call] = at.segment.replica
            known.unreported.add(call)
            for name, place in self.orphans.pop(call, ()):
                self._enter(session, name, call, place, b"")
        elif event in END_EVENTS and call is not None:
            known.running.pop(call, None)
        elif event in DELIVERIES and call is not None:
            known.unreported.discard(call)

    def _under_way(self, replica: str) -> list[str]:
        """Sessions with a line of `replica` of which more was to come."""
        return [
            session
            for session, known in self.sessions.items()
            if replica in known.replicas and (not known.closed or known.running or known.unreported)
        ]
