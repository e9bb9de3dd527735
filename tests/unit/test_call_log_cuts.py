"""The call log of random sessions, in random interleavings, at any cut: right calls or none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogReader
from tests.unit.log_events import delivery, ended, opened, read, write


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[dict[str, Any]]], dict[str, Call]]:
    """Per-call event lists (in their order) of several sessions, and each call as it must be read back."""
    token = st.integers(0, 4)
    per_call: list[list[dict[str, Any]]] = []
    expected: dict[str, Call] = {}
    clock = 0.0
    for session in range(draw(st.integers(1, 2))):
        known: list[Call] = []
        for number in range(draw(st.integers(1, 5))):
            name = f"s{session}c{number}"
            base: list[int] = []
            if known and draw(st.booleans()):
                before = draw(st.sampled_from(known))
                base = (before.prompt_ids + before.ids)[: draw(st.integers(0, 12))]
            prompt = base + draw(st.lists(token, min_size=1, max_size=6))
            parent, shared = _longest(prompt, known)
            ids = draw(st.lists(token, max_size=4))
            status = draw(st.sampled_from(["finished", "length", "cancelled", "failed", "open"]))
            delivered = draw(st.sampled_from([True, False, None]))
            clock += 1
            start = opened(name, f"s{session}", prompt[shared:], parent=parent, shared=shared, t=clock)
            events, spans = [start], None
            if status != "open":
                clock += 1
                spans = [["0.1", 0, len(ids)]] if ids and status in ("finished", "length") else ([] if not ids else None)
                events.append(ended(name, ids, event=status, t=clock, spans=spans))
                if delivered is not None:
                    events.append(delivery(name, event="delivered" if delivered else "undelivered"))
            call = Call(name, f"s{session}", "train", "r0", "chat", "/", False, "agent", "c", prompt, {}, False, 16, start["t"])
            call.status, call.ids = status, ids if status != "open" else []
            call.delivered = delivered if status != "open" else None
            expected[name] = call
            per_call.append(events)
            if status != "open":
                known.append(call)
    return per_call, expected


def _longest(prompt: list[int], known: list[Call]) -> tuple[str | None, int]:
    best: tuple[str | None, int] = (None, 0)
    for call in known:
        before = call.prompt_ids + call.ids
        shared = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), min(len(prompt), len(before)))
        if shared > best[1]:
            best = (call.id, shared)
    return best


def _interleave(per_call: list[list[dict[str, Any]]], seed: int) -> list[dict[str, Any]]:
    """A random order that keeps each call's own order and never opens a call before its parent has ended."""
    chance, queues, order, done = random.Random(seed), [list(events) for events in per_call], [], set()
    while any(queues):
        ready = [q for q in queues if q and (q[0]["event"] != "open" or q[0]["parent"] is None or q[0]["parent"] in done)]
        event = chance.choice(ready).pop(0)
        order.append(event)
        if event["event"] in ("finished", "length", "cancelled", "failed"):
            done.add(event["call"])
    return order


@settings(deadline=None, max_examples=60)
@given(histories(), st.integers(0, 2**32), st.data())
def test_any_interleaving_and_any_cut_gives_right_calls_or_none(
    tmp_path_factory: pytest.TempPathFactory, history: tuple[list[list[dict[str, Any]]], dict[str, Call]], seed: int, data: st.DataObject
) -> None:
    per_call, expected = history
    order = _interleave(per_call, seed)
    directory = tmp_path_factory.mktemp("log")
    content = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in order).encode()
    cut = data.draw(st.integers(0, len(content)))
    reader = CallLogReader(directory)
    (directory / "r0.jsonl").write_bytes(content[:cut])
    reader.refresh()
    whole = content[:cut].count(b"\n")
    happened: dict[str, list[str]] = {}
    for event in order[:whole]:
        happened.setdefault(event["call"], []).append(event["event"])
    assert {call.id for session in reader.sessions() for call in reader.session(session)} == set(happened)
    for session in reader.sessions():
        for call in reader.session(session):
            _is_part_of(call, expected[call.id], happened[call.id], _gone_on_from(order[:whole], expected))
    (directory / "r0.jsonl").write_bytes(content)  # the rest arrives
    reader.refresh()
    for name, events in {event["call"]: [e["event"] for e in order if e["call"] == event["call"]] for event in order}.items():
        (call,) = (c for c in reader.session(expected[name].session) if c.id == name)
        _is_part_of(call, expected[name], events, _gone_on_from(order, expected))


def _gone_on_from(events: list[dict[str, Any]], expected: dict[str, Call]) -> set[str]:
    """Calls of which a prompt holds all: their replies have arrived."""
    parents = [(event["parent"], event["shared"]) for event in events if event["event"] == "open" and event["parent"] is not None]
    return {name for name, shared in parents if expected[name].ids and shared == len(expected[name].prompt_ids + expected[name].ids)}


def _is_part_of(call: Call, whole: Call, happened: list[str], gone_on_from: set[str]) -> None:
    assert call.prompt_ids == whole.prompt_ids and call.session == whole.session
    end = [event for event in happened if event in ("finished", "length", "cancelled", "failed")]
    assert call.status == (end[0] if end else "open")
    assert call.ids == (whole.ids if end else []) and len(call.logprobs) == len(call.ids)
    if call.id in gone_on_from and call.status in ("finished", "length"):
        assert call.delivered
    elif "delivered" not in happened and "undelivered" not in happened:
        assert call.delivered is None and not call.trainable
    else:
        assert call.delivered is ("delivered" in happened)
    assert not call.trainable or (end and end[0] in ("finished", "length"))


@settings(deadline=None, max_examples=30)
@given(histories(), st.integers(0, 2**32), st.integers(2, 4))
def test_many_files_give_what_one_file_gives(
    tmp_path_factory: pytest.TempPathFactory, history: tuple[list[list[dict[str, Any]]], dict[str, Call]], seed: int, files: int
) -> None:
    order = _interleave(history[0], seed)
    one, many = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("many")
    write(one / "r0.jsonl", order)
    home = {call: hash((call, seed)) % files for call in history[1]}
    for number in range(files):
        write(many / f"r{number}.jsonl", [event for event in order if home[event["call"]] == number])
    left, right = read(one), read(many)
    assert sorted(left.sessions()) == sorted(right.sessions())
    for session in left.sessions():
        assert {c.id: c for c in left.session(session)} == {c.id: c for c in right.session(session)}
