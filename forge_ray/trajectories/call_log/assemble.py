"""From the events of a session to its `Call`s and its counters."""

from __future__ import annotations

from collections.abc import Iterable

from forge_ray.trajectories.call import WHOLE, Call
from forge_ray.trajectories.call_log.events import CallEvents, SessionEvents
from forge_ray.trajectories.call_log.state import SessionState
from forge_ray.trajectories.upstream import UpstreamCall, restore, upstream_call


class Incomplete(Exception):
    """A prompt cannot be rebuilt: its parent is not (fully) known, or is none."""

    def __init__(self, events: CallEvents, problem: str) -> None:
        self.events = events
        super().__init__(problem)


def calls(session: SessionEvents, *, quarantined: bool) -> list[Call]:
    """The calls in the order of completion, then those still open in the order they were opened.

    Raises `Incomplete` for a prompt that cannot be rebuilt.
    In a quarantined session such a call is left out instead, and none is trainable.
    """
    prompts: dict[str, list[int]] = {}
    found = []
    for events in (*session.ended(), *session.running()):
        try:
            found.append(_call(session, events, prompts))
        except Incomplete:
            if not quarantined:
                raise
    for call in found:
        call.quarantined = quarantined
    _judge(found)
    return found


def upstream(session: SessionEvents) -> tuple[list[UpstreamCall], list[str]]:
    """The calls that another model answered, by the time of their end, and the ids of those that cannot be put together."""
    found, broken = [], []
    requests, lost = restore({call: event for call, (_, event) in session.upstream.items()})
    for call, (replica, event) in session.upstream.items():
        if call in lost:
            broken.append(call)
            continue
        events = session.calls.get(call)
        try:
            found.append(upstream_call(replica, event, requests[call], events.delivery if events is not None else None))
        except (KeyError, TypeError, ValueError):
            broken.append(call)
    return sorted(found, key=lambda call: (call.ended, call.id)), broken


def state(session: SessionEvents) -> SessionState:
    """Counters and flags."""
    found = SessionState(session.session, closed=bool(session.closed))
    found.limit = min(session.limits, key=lambda limit: limit[1]["t"])[1]["limit"] if session.limits else None
    overflow_t: float | None = None
    for replica, event in session.refused.values():
        found.refused += 1
        found.refused_by[replica] = found.refused_by.get(replica, 0) + 1
        found.refused_for[event["reason"]] = found.refused_for.get(event["reason"], 0) + 1
        if event["reason"] == "overflow":
            overflow_t = max(float(event["t"]), overflow_t or 0.0)
    for events in session.calls.values():
        if events.open is None:
            continue
        found.purpose = events.open["purpose"]
        if events.delivery is not None and events.delivery["event"] == "undelivered":
            found.undelivered += 1
        if events.end is None:
            found.open += 1
            continue
        status = events.end["event"]
        found.calls += status in WHOLE
        found.failed += status == "failed"
        found.cancelled += status == "cancelled"
        found.sampled_tokens += len(events.ids)
    found.upstream = upstream(session)[0]
    ended = session.ended()
    outermost = [events for events in ended if kind(events) == "agent"] or ended
    if outermost:
        last = outermost[-1]
        assert last.end is not None
        found.last_status, found.last_reply = last.end["event"], (last.delivery or {}).get("reply")
    if overflow_t is not None:
        found.overflow = not ended or float((ended[-1].end or {})["t"]) < overflow_t
    return found


def kind(events: CallEvents) -> str:
    """A call's kind, as it was seen last."""
    return (events.kind or events.open or {}).get("kind", "agent")


def _prompt(session: SessionEvents, call: str, prompts: dict[str, list[int]]) -> list[int]:
    chain: list[CallEvents] = []
    at: str | None = call
    while at is not None and at not in prompts:
        events = session.calls.get(at)
        if events is None or events.open is None:
            raise Incomplete(chain[-1], f"parent call {at} is not in the log of session {session.session}")
        if len(chain) > len(session.calls):
            raise Incomplete(events, f"call {at} is its own ancestor")
        chain.append(events)
        at = events.open.get("parent")
    for events in reversed(chain):
        assert events.open is not None
        parent, shared = events.open.get("parent"), events.open["shared"]
        prompt: list[int] = []
        if parent is not None:
            before, sampled = prompts[parent], session.calls[parent].ids
            if shared > len(before) + len(sampled):
                raise Incomplete(events, f"shares {shared} tokens with call {parent}, which has {len(before) + len(sampled)}")
            prompt = before[:shared] + sampled[: max(0, shared - len(before))].tolist()
        prompts[events.open["call"]] = prompt + events.new.tolist()
    return prompts[call]


def _call(session: SessionEvents, events: CallEvents, prompts: dict[str, list[int]]) -> Call:
    assert events.open is not None
    opened, end, delivery = events.open, events.end or {}, events.delivery or {}
    return Call(
        id=opened["call"],
        session=session.session,
        purpose=opened["purpose"],
        replica=opened["replica"],
        dialect=opened["dialect"],
        path=opened["path"],
        streamed=bool(opened["streamed"]),
        kind=kind(events),
        conversation=opened["conversation"],
        prompt_ids=_prompt(session, opened["call"], prompts),
        sampling=dict(opened["sampling"]),
        masked_by_grammar=bool(opened["masked_by_grammar"]),
        max_tokens=int(opened["max_tokens"]),
        opened=float(opened["t"]),
        parent=opened.get("parent"),
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
        usage=delivery.get("usage"),
        reply=delivery.get("reply"),
        request_sha256=opened["request_sha256"],
        response_sha256=delivery.get("response_sha256") or "",
        splice=opened.get("splice", "new"),
        reason=opened.get("reason"),
        rerendered=opened.get("rerendered"),
        overlap=opened.get("overlap") or 0,
        media=list(opened.get("media") or ()),
        spawned_by=opened.get("spawned_by"),
        ignored=list(opened.get("ignored", ())),
        model=opened.get("model"),
        issued=list(delivery.get("issued", ())),
    )


def _judge(calls: Iterable[Call]) -> None:
    """Decide which replies the harness took, by what it sent afterwards.

    A reply that a later prompt goes on from did arrive, whatever was or could not be logged of its delivery. Of equal requests those count
    whose replies were gone on from (sub-agents that were started alike), else the last one (a retry), whichever replicas saw them. Clients
    resend a body unchanged when they believe a reply was lost, and there is no id to tell such a retry by; the path belongs to it, since
    Gemini's dialect names the model there. Several calls behind one request (tools that the server runs) count together.
    """
    requests, parents = _requests(sorted(calls, key=lambda call: call.opened))
    taken = {parents[first].id for first in requests if first in parents}
    equal: dict[tuple[str, str], list[list[Call]]] = {}
    for first, request in requests.items():
        equal.setdefault((request[0].path, request[0].request_sha256 or first), []).append(request)
        for call in request:
            if call.id in taken and call.status in WHOLE:
                call.delivered = True
    for same in equal.values():
        counts = [any(call.id in taken for call in request) for request in same]
        counts[-1] = counts[-1] or not any(counts)
        last = max(number for number, counted in enumerate(counts) if counted)
        for number, request in enumerate(same):
            if not counts[number]:
                by = same[number + 1 if number + 1 < len(same) else last]
                for call in request:
                    call.superseded_by = by[-1].id


def _requests(calls: list[Call]) -> tuple[dict[str, list[Call]], dict[str, Call]]:
    """The calls of each request, by the id of its first; and of each call the one whose prompt and reply its own prompt goes on from."""
    ends = {call.id: (len(call.prompt_ids) + len(call.ids), call) for call in calls if call.ids}
    parents = {call.id: ends[call.parent][1] for call in calls if call.parent in ends and call.shared == ends[call.parent][0]}
    requests: dict[str, list[Call]] = {}
    for call in calls:
        first = call
        while (before := parents.get(first.id)) is not None and _alike(before, call):
            first = before
        requests.setdefault(first.id, []).append(call)
    return requests, parents


def _alike(one: Call, other: Call) -> bool:
    return bool(one.request_sha256) and (one.path, one.request_sha256) == (other.path, other.request_sha256)
