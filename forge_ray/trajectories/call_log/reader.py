"""The incremental reader: follows every file of the directory by offset.

A line without its newline does not exist yet. Anything else that cannot be understood is `CallLogCorrupt` with file and line: a
log that is wrong in the middle must not become a batch. Events of one call may lie in several files (a retry that reached
another replica supersedes a call of the first one), and a file may be read before the file its parents are in, so events are
only collected while reading; `Call` objects are put together when asked for.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_ray.trajectories.call import END_EVENTS, Call
from forge_ray.trajectories.call_log.errors import CallLogCorrupt, CallLogError
from forge_ray.trajectories.call_log.state import SessionState


@dataclass
class _Events:
    """Everything known of one call id."""

    file: Path
    line: int
    open: dict[str, Any] | None = None
    new: array[int] = field(default_factory=lambda: array("i"))
    end: dict[str, Any] | None = None
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    spans: list[tuple[str, int, int]] | None = None
    delivery: dict[str, Any] | None = None
    superseded_by: str | None = None
    kind: str | None = None
    """What a `kind` event says, over the open event's."""


@dataclass
class _Session:
    calls: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    closed: bool = False
    limit: str | None = None
    refused: int = 0
    overflow_t: float | None = None


class CallLogReader:
    """All calls in the `*.jsonl` files of `directory`; `refresh()` takes in what was appended since."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._at: dict[Path, tuple[int, int]] = {}
        self._calls: dict[str, _Events] = {}
        self._sessions: dict[str, _Session] = {}
        self._forgotten: set[str] = set()

    def refresh(self) -> None:
        """Read every complete new line. Raises `CallLogCorrupt` at the first line that is wrong, and again when called again."""
        for file in sorted(self.directory.glob("*.jsonl")):
            offset, number = self._at.get(file, (0, 0))
            try:
                with file.open("rb") as lines:
                    size = os.fstat(lines.fileno()).st_size
                    if size < offset:
                        raise CallLogCorrupt(file, number, f"the file shrank from {offset} to {size} bytes")
                    lines.seek(offset)
                    for line in lines:
                        if not line.endswith(b"\n"):
                            break
                        self._take(file, number + 1, line)
                        offset, number = offset + len(line), number + 1
                        self._at[file] = (offset, number)
            except OSError as error:
                raise CallLogError(f"{file}: cannot be read ({error})") from error

    def sessions(self) -> list[str]:
        """Ids of every session in the log, in the order of their first event."""
        return list(self._sessions)

    def session(self, session: str) -> list[Call]:
        """The calls of `session` in the order of completion, then those still open in the order they were opened.

        A prompt whose parent's file was read too early is completed by one more `refresh()`.
        """
        state = self._sessions.get(session)
        if state is None:
            return []
        try:
            return self._build(session, state)
        except _Incomplete:
            self.refresh()
        try:
            return self._build(session, state)
        except _Incomplete as error:
            raise CallLogCorrupt(error.events.file, error.events.line, str(error)) from None

    def state(self, session: str) -> SessionState:
        """Counters and flags of `session`; all zero for an unknown one."""
        found = SessionState(session)
        record = self._sessions.get(session)
        if record is None:
            return found
        found.closed, found.limit, found.refused = record.closed, record.limit, record.refused
        last: _Events | None = None
        for call in record.calls:
            events = self._calls[call]
            assert events.open is not None
            found.purpose = events.open["purpose"]
            if events.delivery is not None and events.delivery["event"] == "undelivered":
                found.undelivered += 1
            if events.end is None:
                found.open += 1
                continue
            status = events.end["event"]
            found.calls += status in ("finished", "length")
            found.failed += status == "failed"
            found.cancelled += status == "cancelled"
            found.sampled_tokens += len(events.ids)
        ended = self._by_completion(record)
        outermost = [events for events in ended if events.open and (events.kind or events.open["kind"]) == "agent"] or ended
        if outermost:
            last = outermost[-1]
            assert last.end is not None
            found.last_status = last.end["event"]
            found.last_reply = (last.delivery or {}).get("reply")
        if record.overflow_t is not None:
            found.overflow = not ended or (ended[-1].end or {})["t"] < record.overflow_t
        return found

    def forget(self, session: str) -> None:
        """Drop what is held of `session` and ignore whatever is logged of it later, to keep memory bounded in a long run."""
        self._forgotten.add(session)
        record = self._sessions.pop(session, None)
        for call in record.calls if record else ():
            del self._calls[call]

    # --- taking in lines

    def _take(self, file: Path, number: int, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind in ("session", "refused"):
                self._take_session(event)
            elif kind == "open":
                self._take_open(file, number, event)
            elif kind in END_EVENTS:
                self._take_end(file, number, event)
            elif kind in ("delivered", "undelivered"):
                events = self._events(file, number, event["call"])
                # Of two reports the worse one counts: a reply is trained only if nobody doubts that it arrived.
                if events.delivery is None or kind == "undelivered":
                    events.delivery = event
            elif kind == "kind":
                self._events(file, number, event["call"]).kind = _text(event["kind"])
            elif kind == "superseded":
                self._events(file, number, event["call"]).superseded_by = _text(event["by"])
            else:
                raise CallLogCorrupt(file, number, f"unknown event {kind!r}")
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise CallLogCorrupt(file, number, f"no event of a call log ({type(error).__name__}: {error})") from error

    def _events(self, file: Path, number: int, call: str) -> _Events:
        return self._calls.setdefault(_text(call), _Events(file, number))

    def _take_session(self, event: dict[str, Any]) -> None:
        session = _text(event["session"])
        if session in self._forgotten:
            return
        record = self._sessions.setdefault(session, _Session())
        if event["event"] == "refused":
            record.refused += 1
            if event["reason"] == "overflow":
                record.overflow_t = max(float(event["t"]), record.overflow_t or 0.0)
        elif event["status"] == "closed":
            record.closed = True
        elif event["status"] == "limit":
            record.limit = record.limit or _text(event["limit"])
        else:
            raise ValueError(f"session status {event['status']!r}")

    def _take_open(self, file: Path, number: int, event: dict[str, Any]) -> None:
        new = array("i", event.pop("new"))
        if event["session"] in self._forgotten:
            return
        shared = event["shared"]
        if shared < 0 or (event["parent"] is None) != (shared == 0) or event["parent"] == event["call"]:
            raise ValueError(f"parent {event['parent']!r} with shared {shared}")
        events = self._events(file, number, event["call"])
        if events.open is not None:
            if (events.open, events.new) != (event, new):
                raise CallLogCorrupt(file, number, f"call {event['call']} was opened differently in {events.file}:{events.line}")
            return
        for name in ("session", "purpose", "replica", "dialect", "path", "kind", "conversation", "request_sha256", "version"):
            _text(event[name])
        float(event["t"])
        events.file, events.line, events.open, events.new = file, number, event, new
        record = self._sessions.setdefault(event["session"], _Session())
        record.calls.append(event["call"])
        if events.end is not None:
            record.ended.append(event["call"])

    def _take_end(self, file: Path, number: int, event: dict[str, Any]) -> None:
        ids, logprobs = array("i", event.pop("ids")), array("d", event.pop("logprobs"))
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids and {len(logprobs)} logprobs")
        spans = event.pop("spans")
        if spans is not None:
            spans = [(_text(version), int(first), int(end)) for version, first, end in spans]
            edges = [0, *(end for _, _, end in spans)]
            starts = [first for _, first, _ in spans]
            if starts != edges[:-1] or edges[-1] != len(ids) or any(a >= b for a, b in pairwise(edges)):
                raise ValueError(f"version spans {spans} do not tile {len(ids)} ids")
        float(event["t"])
        events = self._events(file, number, event["call"])
        if events.end is not None:
            if (events.end, events.ids, events.logprobs, events.spans) != (event, ids, logprobs, spans):
                raise CallLogCorrupt(file, number, f"call {event['call']} ended twice, differently")
            return
        events.end, events.ids, events.logprobs, events.spans = event, ids, logprobs, spans
        if events.open is not None:
            self._sessions[events.open["session"]].ended.append(event["call"])

    # --- putting calls together

    def _by_completion(self, record: _Session) -> list[_Events]:
        """Ended calls by the time of their end; equal times in the order of the log."""
        return sorted((self._calls[call] for call in record.ended), key=lambda events: float((events.end or {})["t"]))

    def _build(self, session: str, record: _Session) -> list[Call]:
        prompts: dict[str, list[int]] = {}
        ended = self._by_completion(record)
        running = [self._calls[call] for call in record.calls if self._calls[call].end is None]
        calls = [self._call(session, events, prompts) for events in (*ended, *running)]
        _supersede_across_replicas(calls)
        return calls

    def _prompt(self, session: str, call: str, prompts: dict[str, list[int]]) -> list[int]:
        chain: list[_Events] = []
        at: str | None = call
        while at is not None and at not in prompts:
            events = self._calls.get(at)
            if events is None or events.open is None:
                raise _Incomplete(chain[-1], f"parent call {at} is not in the log")
            if events.open["session"] != session:
                raise CallLogCorrupt(chain[-1].file, chain[-1].line, f"parent call {at} belongs to another session")
            if len(chain) > len(self._calls):
                raise CallLogCorrupt(events.file, events.line, f"call {at} is its own ancestor")
            chain.append(events)
            at = events.open["parent"]
        for events in reversed(chain):
            assert events.open is not None
            parent, shared = events.open["parent"], events.open["shared"]
            prompt: list[int] = []
            if parent is not None:
                before, sampled = prompts[parent], self._calls[parent].ids
                if shared > len(before) + len(sampled):
                    raise _Incomplete(events, f"shares {shared} tokens with call {parent}, which has {len(before) + len(sampled)}")
                prompt = before[:shared] + sampled[: max(0, shared - len(before))].tolist()
            prompts[events.open["call"]] = prompt + events.new.tolist()
        return prompts[call]

    def _call(self, session: str, events: _Events, prompts: dict[str, list[int]]) -> Call:
        assert events.open is not None
        opened, end, delivery = events.open, events.end or {}, events.delivery or {}
        return Call(
            id=opened["call"],
            session=session,
            purpose=opened["purpose"],
            replica=opened["replica"],
            dialect=opened["dialect"],
            path=opened["path"],
            streamed=bool(opened["streamed"]),
            kind=events.kind or opened["kind"],
            conversation=opened["conversation"],
            prompt_ids=self._prompt(session, opened["call"], prompts),
            sampling=dict(opened["sampling"]),
            masked_by_grammar=bool(opened["masked_by_grammar"]),
            max_tokens=int(opened["max_tokens"]),
            opened=float(opened["t"]),
            parent=opened["parent"],
            shared=opened["shared"],
            ids=events.ids.tolist(),
            logprobs=events.logprobs.tolist(),
            spans=None if events.spans is None else list(events.spans),
            version_open=opened["version"],
            version_end=end.get("version") or "",
            status=end.get("event", "open"),
            finish_reason=end.get("finish_reason"),
            stop_reason=end.get("stop_reason"),
            error=end.get("error"),
            ended=end.get("t"),
            delivered=delivery["event"] == "delivered" if delivery else None,
            superseded_by=events.superseded_by,
            usage=delivery.get("usage"),
            reply=delivery.get("reply"),
            request_sha256=opened["request_sha256"],
            response_sha256=delivery.get("response_sha256") or "",
            splice=opened.get("splice", "new"),
            reason=opened.get("reason"),
            rerendered=opened.get("rerendered"),
            spawned_by=opened.get("spawned_by"),
            ignored=list(opened.get("ignored", ())),
            model=opened.get("model"),
            issued=list(delivery.get("issued", ())),
        )


class _Incomplete(Exception):
    """A parent is not (fully) known; perhaps its file was read before it was written."""

    def __init__(self, events: _Events, problem: str) -> None:
        self.events = events
        super().__init__(problem)


def _supersede_across_replicas(calls: Iterable[Call]) -> None:
    """Mark the earlier of two equal requests that reached different replicas: neither replica knew of the other's call."""
    latest: dict[str, Call] = {}
    for call in sorted(calls, key=lambda call: call.opened):
        earlier = latest.get(call.request_sha256)
        if earlier is not None and earlier.replica != call.replica and earlier.superseded_by is None:
            earlier.superseded_by = call.id
        if call.request_sha256:
            latest[call.request_sha256] = call


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
