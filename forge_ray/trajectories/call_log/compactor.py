"""Compaction: bounds the log by moving what is over out of the JSONL segments into Parquet, which takes a fraction of the space.

A segment can go when it is not written any more and every event in it is in a part. A session is moved whole, out of all segments, when
it is over: closed, its calls ended or their replica dead, and quiet for `grace_s`; or without any event for `idle_s`. Only sessions that
free a segment are moved, so a run whose log never reaches the bound of a segment is never compacted.

Order of things, so that a crash anywhere neither loses nor doubles an event: the part is written under a hidden name, synced, renamed,
the directory synced; only then are segments deleted. The part's metadata says up to where it holds its sessions' events of each segment,
so a compactor that starts anew does not move them again; a reader takes the union, in which an event counts once. What is logged of a
session after it was moved is moved later, as event rows.

A segment with a line that nobody can understand, and one that holds a session in quarantine, stays: it is the evidence.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forge_ray.disk import sync
from forge_ray.trajectories.call_log import table
from forge_ray.trajectories.call_log.events import CallEvents, SessionEvents
from forge_ray.trajectories.call_log.lines import Known, Line, Lines
from forge_ray.trajectories.call_log.parts import FOLDER, Part, Parts
from forge_ray.trajectories.call_log.problems import TornTail
from forge_ray.trajectories.call_log.reader import take_lines
from forge_ray.trajectories.call_log.segments import Segment, writing

logger = logging.getLogger(__name__)


@dataclass
class Compacted:
    """What one compaction did."""

    part: Path | None = None
    sessions: int = 0
    calls: int = 0
    removed: list[str] = field(default_factory=list)
    """Names of the deleted segments."""
    bytes_before: int = 0
    bytes_after: int = 0
    """Size of the deleted segments, and of the part."""


class Compactor:
    """Compacts the log in `directory`, as often as `run` is called. It follows the log, so that a further run reads only what is new.

    `least_bytes`: a part is written only if it frees segments of that many bytes together. Not for several threads at once; several
    processes exclude one another.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        grace_s: float = 60.0,
        idle_s: float = 3600.0,
        quiet_s: float = 600.0,
        least_bytes: int = 0,
    ) -> None:
        self.directory = Path(directory)
        self.grace_s, self.idle_s, self.quiet_s, self.least_bytes = grace_s, idle_s, quiet_s, least_bytes
        self._lines, self._parts = Lines(self.directory), Parts(self.directory)
        self._taken: dict[str, dict[str, int]] = {}
        """Session -> segment name -> bytes below which its events are in a part."""
        self._seen: set[str] = set()

    def run(self, alive: Collection[str] = ()) -> Compacted:
        """Compact what can be compacted now. `alive`: replicas that are known to live; locks tell as well (`segments.writing`).

        Raises `CallLogError` or `OSError` where the directory cannot be read or written; then nothing has changed.
        """
        with _alone(self.directory) as first:
            return self._run(alive, time.time()) if first else Compacted()

    def _run(self, alive: Collection[str], now: float) -> Compacted:
        self._lines.refresh()
        self._parts.refresh()
        for name in self._parts.known.keys() - self._seen:
            self._seen.add(name)
            self._note(self._parts.known[name])
        self._settle_orphans()
        present = set(self._lines.present)
        live = writing(present, alive=alive, quiet_s=self.quiet_s, now=now)
        newest = {segment.replica: segment for segment in self._lines.present}
        over = {segment for segment in present if segment != newest[segment.replica] or not live[segment.replica]}
        if not over:
            return Compacted()
        left = {
            session: [line for line in self._left(session, known) if line.segment in present]
            for session, known in self._lines.sessions.items()
        }
        free, moved = self._plan(over, left, live, now)
        if moved and sum(segment.path.stat().st_size for segment in free) < self.least_bytes:
            return Compacted()
        result, torn = Compacted(), self._torn(free)
        if moved:
            self._move(moved, left, torn, result)
            free = {segment for segment in free if not any(line.segment == segment for session in moved for line in left[session])}
        for segment in sorted(free):
            result.bytes_before += segment.path.stat().st_size
            segment.path.unlink()
            result.removed.append(segment.name)
        if free:
            sync(self.directory)
        return result

    # ---- what can go

    def _plan(self, over: set[Segment], left: dict[str, list[Line]], live: dict[str, bool], now: float) -> tuple[set[Segment], list[str]]:
        """Segments that can go, and the sessions that have to be moved for it."""
        inside: dict[Segment, set[str]] = {segment: set() for segment in over}
        for session, lines in left.items():
            for segment in {line.segment for line in lines} & over:
                inside[segment].add(session)
        ready = {session for session in {s for found in inside.values() for s in found} if self._ready(session, live, now)}
        wrong = {problem.file for problem in self._lines.problems}
        orphaned = {line.segment for places in self._lines.orphans.values() for _, line in places}
        free = {
            segment
            for segment, found in inside.items()
            if found <= ready and segment.path not in wrong and segment not in orphaned and self._whole(segment)
        }
        return free, sorted({session for segment in free for session in inside[segment]})

    def _whole(self, segment: Segment) -> bool:
        """Not one torn event and nothing else: that could not be reported any more."""
        return self._lines.read.get(segment, (0, 0))[0] > 0 or segment.path.stat().st_size == 0

    def _ready(self, session: str, live: dict[str, bool], now: float) -> bool:
        known = self._lines.sessions[session]
        if session in self._lines.quarantined:
            return False
        quiet = now - known.last
        closed = known.closed or self._parts.closed(session)
        running = any(live.get(replica, False) for replica in known.running.values())
        return quiet >= self.idle_s or (closed and not running and quiet >= self.grace_s)

    def _left(self, session: str, known: Known) -> Iterator[Line]:
        """The lines of a session that no part has."""
        taken = self._taken.get(session, {})
        return (line for line in self._lines.lines(known) if line.offset >= taken.get(line.segment.name, 0))

    def _note(self, part: Part) -> None:
        for session in part.groups:
            taken = self._taken.setdefault(session, {})
            for name, size in part.taken.items():
                taken[name] = max(size, taken.get(name, 0))

    def _settle_orphans(self) -> None:
        """Find the sessions of events whose call was opened in a segment that is gone; events of a call that nobody ever opened (a full
        disk took that event) have none: they are moved under the session ''."""
        if not self._lines.orphans:
            return
        found: dict[str, str] = {}
        for part in self._parts.known.values():
            try:
                found |= table.sessions_of(part, set(self._lines.orphans))
            except table.NoPart as error:
                logger.warning("%s", error)
                return
        for call in list(self._lines.orphans):
            self._lines.adopt(call, found.get(call, ""))

    def _torn(self, free: set[Segment]) -> list[TornTail]:
        tails = [(segment.path, segment.path.stat().st_size - self._lines.read.get(segment, (0, 0))[0]) for segment in sorted(free)]
        return [TornTail(path, size) for path, size in tails if size > 0]

    # ---- moving

    def _move(self, moved: list[str], left: dict[str, list[Line]], torn: list[TornTail], result: Compacted) -> None:
        """Write one part with every line that is left of the sessions `moved`. A session that turns out to be wrong stays, and its entry in
        `left`; the others' are emptied."""
        writer = table.PartWriter(self.directory)
        taken: dict[str, int] = {}
        try:
            for session in moved:
                rows = self._rows(session, left[session])
                if rows is None:
                    continue
                known = self._lines.sessions[session]
                closed = known.closed or self._parts.closed(session)
                writer.add(session, rows, closed=closed, size=sum(line.length for line in left[session]))
                result.sessions += 1
                result.calls += sum(row["row"] == "call" for row in rows)
                taken |= {line.segment.name: self._lines.read[line.segment][0] for line in left[session]}
                left[session] = []
            if not result.sessions:
                writer.abandon()
                return
            part = writer.commit(taken, torn)
        except BaseException:
            writer.abandon()
            raise
        result.part, result.bytes_after = part.path, part.path.stat().st_size
        self._parts.refresh()
        self._seen.add(part.path.name)
        self._note(part)
        for session in part.groups:
            # Later lines of it come in as new ones.
            self._lines.drop(session)

    def _rows(self, session: str, lines: list[Line]) -> list[dict[str, object]] | None:
        """The rows of what is left of a session; None where it is wrong."""
        events, before = SessionEvents(session), len(self._lines.problems)
        take_lines(self._lines, events, lines)
        if len(self._lines.problems) > before:
            logger.warning("not compacted: %s", self._lines.problems[-1])
            return None
        rows = [table.event_row(session, replica, event) for replica, event in (*events.closed, *events.limits, *events.refused.values())]
        rows += [table.event_row(session, replica, event) for replica, event in events.upstream.values()]
        replica = lines[0].segment.replica if lines else ""
        for call in events.calls.values():
            if call.open is not None:
                rows.append(table.call_row(session, call))
            else:
                rows += [table.event_row(session, replica, event) for event in late(call)]
        return rows


def late(call: CallEvents) -> Iterator[dict[str, object]]:
    """The events of a call whose row was written before they happened."""
    if call.end is not None:
        yield {**call.end, "ids": call.ids.tolist(), "logprobs": call.logprobs.tolist(), "spans": call.spans}
    for event in (call.delivery, call.kind):
        if event is not None:
            yield event


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Whether no other process compacts `directory` now; while that holds, hidden files of a dead one are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / ".compact.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            logger.warning("the call log is not compacted: %s knows no locks (%s)", directory, error)
            yield False
            return
        for file in (directory / FOLDER).glob(".part-*"):
            file.unlink(missing_ok=True)
        yield True
    finally:
        os.close(lock)
