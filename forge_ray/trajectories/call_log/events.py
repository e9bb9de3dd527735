"""The events of one session, put together from wherever they are stored.

The log is a *set* of events: JSONL segments and Parquet parts are containers, an event may lie in two of them (a compaction that was
cut short, a segment that is still needed for another session), and taking it twice changes nothing. Two events that contradict each other
are a `ValueError`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_ray.trajectories.call import END_EVENTS

Event = dict[str, Any]
DELIVERIES = ("delivered", "undelivered")
EVENTS = frozenset(("session", "refused", "upstream", "open", *END_EVENTS, *DELIVERIES, "kind"))
FORMER = frozenset(("superseded",))
"""Events of earlier writers, which are passed over: the requests themselves tell which of them were repeated (`assemble`)."""
_TEXTS = ("session", "purpose", "replica", "dialect", "path", "kind", "conversation", "request_sha256", "version")


@dataclass
class CallEvents:
    """Everything known of one call id. Fields whose value is null are left out of the events."""

    file: Path
    line: int
    """Where its open event is; before that is known, where it was mentioned first."""
    open: Event | None = None
    new: array[int] = field(default_factory=lambda: array("i"))
    end: Event | None = None
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    spans: list[tuple[str, int, int]] | None = None
    delivery: Event | None = None
    kind: Event | None = None
    """What corrects the open event's kind."""


class SessionEvents:
    """What was logged of `session`."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.calls: dict[str, CallEvents] = {}
        """By id, in the order of their first event."""
        self.closed: list[tuple[str, Event]] = []
        self.limits: list[tuple[str, Event]] = []
        self.refused: dict[tuple[Any, ...], tuple[str, Event]] = {}
        """With the replica that refused. Equal in every field: the same refusal (`t` has a resolution of under a microsecond)."""
        self.upstream: dict[str, tuple[str, Event]] = {}
        """Calls that another model answered, as text, by id; with the replica that passed them on."""

    def take(self, event: Event, replica: str, file: Path, line: int) -> None:
        """Take one event in. Raises `ValueError`, `TypeError`, `KeyError` or `OverflowError` for what is no event of this session."""
        name = event["event"]
        if name == "session":
            self._session(event, replica)
        elif name == "refused":
            event = _without_nulls(event)
            self._is_ours(event)
            float(event["t"])
            self.refused.setdefault(tuple(sorted((key, str(value)) for key, value in event.items())), (replica, event))
        elif name == "upstream":
            event = _without_nulls(event)
            self._is_ours(event)
            self.upstream[_text(event["call"])] = (replica, event)
        elif name == "open":
            self._open(event, file, line)
        elif name in END_EVENTS:
            self._end(event, file, line)
        elif name in DELIVERIES:
            events = self._call(event, file, line)
            # Of two reports the worse one counts: a reply is trained only if nobody doubts that it arrived.
            if events.delivery is None or (name == "undelivered" and events.delivery["event"] != name):
                events.delivery = _without_nulls(event)
        elif name == "kind":
            _text(event["kind"])
            events = self._call(event, file, line)
            if events.kind is None or float(event["t"]) > events.kind["t"]:
                events.kind = _without_nulls(event)
        elif name not in FORMER:
            raise ValueError(f"unknown event {name!r}")

    def ended(self) -> list[CallEvents]:
        """Calls with an open and an end event, by the time of their end (equal times: of their beginning, then by id)."""
        found = [events for events in self.calls.values() if events.open is not None and events.end is not None]
        return sorted(found, key=lambda events: (float((events.end or {})["t"]), *_begin(events)))

    def running(self) -> list[CallEvents]:
        """Calls without an end event, in the order they were opened."""
        return sorted((events for events in self.calls.values() if events.open is not None and events.end is None), key=_begin)

    def _is_ours(self, event: Event) -> None:
        if event["session"] != self.session:
            raise ValueError(f"an event of session {event['session']!r} among those of {self.session!r}")

    def _call(self, event: Event, file: Path, line: int) -> CallEvents:
        return self.calls.setdefault(_text(event["call"]), CallEvents(file, line))

    def _session(self, event: Event, replica: str) -> None:
        self._is_ours(event)
        float(event["t"])
        if event["status"] == "closed":
            kept = self.closed
        elif event["status"] == "limit":
            _text(event["limit"])
            kept = self.limits
        else:
            raise ValueError(f"session status {event['status']!r}")
        event = _without_nulls(event)
        if (replica, event) not in kept:
            kept.append((replica, event))

    def _open(self, event: Event, file: Path, line: int) -> None:
        self._is_ours(event)
        new, event = array("i", event["new"]), _without_nulls({key: value for key, value in event.items() if key != "new"})
        shared, parent = event["shared"], event.get("parent")
        if not isinstance(shared, int) or shared < 0 or (parent is None) != (shared == 0) or parent == event["call"]:
            raise ValueError(f"parent {parent!r} with shared {shared}")
        events = self._call(event, file, line)
        if events.open is not None:
            if (events.open, events.new) != (event, new):
                raise ValueError(f"call {event['call']} was opened differently in {events.file}:{events.line}")
            return
        for name in _TEXTS:
            _text(event[name])
        float(event["t"])
        if not isinstance(event["sampling"], dict):
            raise TypeError(f"sampling {event['sampling']!r} is no object")
        events.file, events.line, events.open, events.new = file, line, event, new

    def _end(self, event: Event, file: Path, line: int) -> None:
        ids, logprobs, spans = array("i", event["ids"]), array("d", event["logprobs"]), event["spans"]
        event = _without_nulls({key: value for key, value in event.items() if key not in ("ids", "logprobs", "spans")})
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids and {len(logprobs)} logprobs")
        if spans is not None:
            spans = [(_text(version), int(first), int(end)) for version, first, end in spans]
            edges = [0, *(end for _, _, end in spans)]
            starts = [first for _, first, _ in spans]
            if starts != edges[:-1] or edges[-1] != len(ids) or any(a >= b for a, b in pairwise(edges)):
                raise ValueError(f"version spans {spans} do not tile {len(ids)} ids")
        float(event["t"])
        events = self._call(event, file, line)
        if events.end is not None:
            if (events.end, events.ids, events.logprobs, events.spans) != (event, ids, logprobs, spans):
                raise ValueError(f"call {event['call']} ended twice, differently")
            return
        events.end, events.ids, events.logprobs, events.spans = event, ids, logprobs, spans


def _begin(events: CallEvents) -> tuple[float, str]:
    assert events.open is not None
    return float(events.open["t"]), events.open["call"]


def _without_nulls(event: Event) -> Event:
    return {key: value for key, value in event.items() if value is not None}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
