"""The reader: every session of the log, wherever its events are, followed as they are written.

Events lie in JSONL segments, which grow, and in Parquet parts, into which a compaction moves them before it deletes their segments. A
session is the union of its events in both, so it does not matter when a reader looks, or whether it had begun with a segment that is gone.
`refresh` looks at the heads of new lines only (`lines`); what a session's events say is parsed when that session is asked for.

What is wrong in the log does not stop the reader. It is reported (`problems`, `torn`), and the sessions that it touches are in
quarantine: their calls are given as far as they can be put together, and none of them is trainable.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import assemble
from forge_ray.trajectories.call_log.events import SessionEvents
from forge_ray.trajectories.call_log.lines import Line, Lines
from forge_ray.trajectories.call_log.parts import Parts
from forge_ray.trajectories.call_log.problems import Problem, TornTail
from forge_ray.trajectories.call_log.segments import claimed
from forge_ray.trajectories.call_log.state import SessionState
from forge_ray.trajectories.upstream import UpstreamCall

WRONG = (ValueError, TypeError, KeyError, OverflowError, AttributeError)
"""What a line that is no event raises where it is taken in."""


class CallLogReader:
    """The call log in `directory`; without the segments of the replica `exclude`, if that is given. Not for several threads at once."""

    def __init__(self, directory: str | os.PathLike[str], *, exclude: str | None = None) -> None:
        self.directory = Path(directory)
        self._lines, self._parts = Lines(self.directory, exclude), Parts(self.directory)
        self._parsed: tuple[str, tuple[int, int, int], SessionEvents] | None = None

    def refresh(self) -> None:
        """Take in what was appended since. Raises `CallLogError` where a file cannot be read."""
        self._lines.refresh()
        self._parts.refresh()  # in this order: a segment is deleted after its part is there

    def sessions(self) -> list[str]:
        """Ids of every session in the log, those of the Parquet parts first, in the order of their first event."""
        known = dict.fromkeys([*self._parts.sessions(), *self._lines.sessions])
        return [session for session in known if session and not self._lines.forgotten(session)]

    def session(self, session: str) -> list[Call]:
        """The calls of `session` in the order of completion, then those still open in the order they were opened."""
        for attempt in range(2):
            events = self._events(session)
            try:
                return assemble.calls(events, quarantined=session in self._lines.quarantined)
            except assemble.Incomplete as error:
                if attempt == 0:
                    self.refresh()  # the parent's file may have been read too early
                    continue
                self._lines.quarantine([session], error.events.file, error.events.line, str(error))
        return assemble.calls(events, quarantined=True)

    def state(self, session: str) -> SessionState:
        """Counters and flags of `session`; all zero for an unknown one."""
        return assemble.state(self._events(session))

    def upstream(self, session: str) -> list[UpstreamCall]:
        """The calls of `session` that another model answered, as text, by the time of their end."""
        events = self._events(session)
        calls, broken = assemble.upstream(events)
        if broken and session not in self._lines.quarantined:
            self._lines.quarantine([session], self.directory, 0, f"upstream calls that cannot be put together: {', '.join(broken[:3])}")
        return calls

    def knows(self, session: str) -> bool:
        """Whether anything of `session` is in the log (and not forgotten). Parses nothing."""
        return (session in self._lines.sessions or session in self._parts) and not self._lines.forgotten(session)

    def closed(self, session: str) -> bool:
        """Whether `session` was closed. Parses nothing."""
        known = self._lines.sessions.get(session)
        return (known is not None and known.closed) or self._parts.closed(session)

    def closed_before(self, t: float) -> list[str]:
        """Closed sessions in JSONL without an event since the Unix second `t`. Parses nothing."""
        return [session for session, known in self._lines.sessions.items() if known.closed and known.last < t]

    def replicas(self, session: str) -> dict[str, int]:
        """Events of `session` in segments that were not compacted, by the replica that wrote them. Parses nothing."""
        known = self._lines.sessions.get(session)
        return dict(known.replicas) if known is not None else {}

    def parts(self, session: str) -> int:
        """Parquet parts that hold events of `session`."""
        return self._parts.number(session)

    def _stamp(self, session: str) -> tuple[int, int, int]:
        """Changes when there is more to know of the session."""
        known = self._lines.sessions.get(session)
        # Of a session in a part any new line may be about it: such a line names a call that was opened in a segment that is gone.
        lines = self._lines.taken if session in self._parts else 0
        return len(known.places) if known is not None else 0, self._parts.number(session), lines

    def forget(self, session: str) -> None:
        """Drop what is held of `session` and ignore whatever is logged of it later, to keep memory bounded in a long run."""
        self._lines.forget(session)
        self._parsed = None

    @property
    def problems(self) -> list[Problem]:
        """What was found wrong so far. Lines are judged when their session is asked for, see `verify`."""
        return [*self._parts.problems, *self._lines.problems]

    def quarantined(self, session: str) -> Problem | None:
        """Why no call of `session` is trainable, or None."""
        return self._lines.quarantined.get(session)

    def torn(self) -> list[TornTail]:
        """Torn tails of the segments of the last refresh that nobody writes any more, and of those that were compacted."""
        found = {tail.file: tail for part in self._parts.known.values() for tail in part.torn}
        for segment in self._lines.present:
            offset = self._lines.read.get(segment, (0, 0))[0]
            try:
                if segment.path.stat().st_size == offset or claimed(segment.path):
                    continue
                with segment.path.open("rb") as file:  # which may have got whole lines, and its end, since that refresh
                    file.seek(offset)
                    size = len(file.read().rpartition(b"\n")[2])
            except FileNotFoundError:
                continue
            if size:
                found[segment.path] = TornTail(segment.path, size)
        return list(found.values())

    def verify(self) -> list[Problem]:
        """Parse every session that is still in JSONL and return all problems. Reads the whole log but for its Parquet parts."""
        for session in list(self._lines.sessions):
            self.session(session)
        return self.problems

    def _events(self, session: str) -> SessionEvents:
        if self._lines.forgotten(session):
            return SessionEvents(session)
        stamp = self._stamp(session)
        if self._parsed is None or self._parsed[:2] != (session, stamp):
            events = read(self._lines, self._parts, session)
            self._parsed = (session, self._stamp(session), events)
        return self._parsed[2]


def read(lines: Lines, parts: Parts, session: str) -> SessionEvents:
    """Everything that is logged of `session`. What is wrong puts it into quarantine."""
    events = SessionEvents(session)
    known = lines.sessions.get(session)
    places = list(lines.lines(known)) if known is not None else []
    gone = take_lines(lines, events, places)
    if gone:
        parts.refresh()  # a compaction has them: its part was there before their segment went
    try:
        rows, compacted = parts.take(events)
    except WRONG as error:
        lines.quarantine([session], parts.directory, 0, str(error))
        return events
    # Calls that were opened in a segment that is gone and ended in one that is here.
    late = [place for call in compacted for _, place in lines.orphans.get(call, ())]
    take_lines(lines, events, late)
    if gone and not rows:
        lines.quarantine([session], gone[0].segment.path, 0, "the file is gone, and no Parquet part has what it held")
    return events


def take_lines(lines: Lines, events: SessionEvents, places: list[Line]) -> list[Line]:
    """Take in the events at `places`; returns the places whose file is gone."""
    files: dict[Path, BinaryIO | None] = {}
    gone = []
    try:
        for place in places:
            path = place.segment.path
            if path not in files:
                try:
                    files[path] = path.open("rb")
                except FileNotFoundError:
                    files[path] = None
            file = files[path]
            if file is None:
                gone.append(place)
                continue
            file.seek(place.offset)
            try:
                events.take(json.loads(file.read(place.length)), place.segment.replica, path, place.number)
            except WRONG as error:
                ours = isinstance(error, ValueError) and not isinstance(error, UnicodeError | json.JSONDecodeError)
                text = str(error) if ours else f"no event of a call log ({type(error).__name__}: {error})"
                if not any((known.file, known.line) == (path, place.number) for known in lines.problems):
                    lines.quarantine([events.session], path, place.number, text)
    finally:
        for file in files.values():
            if file is not None:
                file.close()
    return gone
