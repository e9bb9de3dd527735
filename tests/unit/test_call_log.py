"""The call log: what is written can be read back, at any cut, in any interleaving; errors reach every waiter."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogError, CallLogReader, CallLogWriter


def opened(
    call: str, session: str, new: list[int], *, parent: str | None = None, shared: int = 0, t: float = 1.0, **changes: Any
) -> dict[str, Any]:
    event = {"event": "open", "call": call, "session": session, "purpose": "train", "replica": "r0", "t": t, "dialect": "chat"}
    event |= {"path": "/v1/chat/completions", "streamed": False, "kind": "agent", "conversation": "c", "request_sha256": f"sha-{call}"}
    event |= {"parent": parent, "shared": shared, "new": new, "sampling": {"temperature": 0.7}, "masked_by_grammar": False}
    return event | {"max_tokens": 16, "version": "0.1"} | changes


def ended(call: str, ids: list[int], *, event: str = "finished", t: float = 2.0, **changes: Any) -> dict[str, Any]:
    spans = [["0.1", 0, len(ids)]] if ids else []
    end = {"event": event, "call": call, "t": t, "ids": ids, "logprobs": [-0.5] * len(ids), "spans": spans}
    return end | {"finish_reason": "stop", "stop_reason": None, "version": "0.1", "error": None} | changes


def delivery(call: str, *, event: str = "delivered", reply: str | None = "answer") -> dict[str, Any]:
    return {"event": event, "call": call, "t": 3.0, "response_sha256": "x", "bytes": 9, "status": 200, "usage": None, "reply": reply} | {
        "first_byte_s": 0.1,
        "last_byte_s": 0.2,
    }


def whole(call: str, session: str, new: list[int] | None = None, ids: list[int] | None = None, t: float = 1.0) -> list[dict[str, Any]]:
    """A call that is trainable."""
    return [opened(call, session, new or [1, 2], t=t), ended(call, ids or [3], t=t + 1), delivery(call)]


def write(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def read(directory: Path) -> CallLogReader:
    reader = CallLogReader(directory)
    reader.refresh()
    return reader


# --- writer


def test_an_append_that_returned_is_in_the_file(tmp_path: Path) -> None:
    async def run() -> None:
        log = CallLogWriter(tmp_path / "calls" / "r0.jsonl")
        await log.append(opened("a", "s", [1, 2]))
        assert [json.loads(line)["call"] for line in log.path.read_text().splitlines()] == ["a"]
        await asyncio.gather(*(log.append(opened(f"b{i}", "s", [i])) for i in range(200)))
        assert len(log.path.read_text().splitlines()) == 201
        log.close()
        log.close()
        with pytest.raises(CallLogError, match="closed"):
            await log.append(opened("c", "s", [1]))

    asyncio.run(run())
    assert len(read(tmp_path / "calls").session("s")) == 201


def test_syncs_are_shared_and_leave_the_loop_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_thread, real, syncs = threading.current_thread(), os.fdatasync, []
    gate = threading.Event()

    def sync(file: int) -> None:
        assert threading.current_thread() is not loop_thread
        assert gate.wait(60)
        syncs.append(file)
        real(file)

    monkeypatch.setattr(os, "fdatasync", sync)

    async def run() -> None:
        log = CallLogWriter(tmp_path / "r0.jsonl")
        waiting = [asyncio.create_task(log.append(opened(f"c{i}", "s", [i]))) for i in range(50)]
        await asyncio.sleep(0.05)  # the loop runs while the thread is stuck in its first sync
        assert not any(task.done() for task in waiting)
        gate.set()
        await asyncio.gather(*waiting)
        log.close()

    asyncio.run(run())
    assert len(syncs) <= 3


def test_a_cancelled_wait_still_writes(tmp_path: Path) -> None:
    async def run() -> None:
        log = CallLogWriter(tmp_path / "r0.jsonl")
        task = asyncio.create_task(log.append(opened("a", "s", [1])))
        await asyncio.sleep(0)
        task.cancel()
        await log.append(opened("b", "s", [1]))
        log.close()

    asyncio.run(run())
    assert [call.id for call in read(tmp_path).session("s")] == ["a", "b"]


def test_what_is_held_goes_with_the_next_event_or_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        log = CallLogWriter(tmp_path / "r0.jsonl")
        whole, sizes = log._write, []
        monkeypatch.setattr(log, "_write", lambda lines: (sizes.append(len(lines)), whole(lines))[1])
        first = log.hold(opened("a", "s", [1]))
        assert not first.done() and not log.path.read_bytes()
        await log.append(ended("a", [2]))
        assert first.done() and sizes == [2]
        await log.hold(opened("b", "s", [1]))
        third = log.hold(opened("c", "s", [1]))
        log.flush()
        await third
        log.hold(opened("d", "s", [1]))
        log.close()
        assert sizes == [2, 1, 1, 1]

    asyncio.run(run())
    assert [call.id for call in read(tmp_path).session("s")] == ["a", "b", "c", "d"]


def test_an_event_whose_forerunner_is_not_on_disk_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        log = CallLogWriter(tmp_path / "r0.jsonl")
        with monkeypatch.context() as patch:
            patch.setattr(log, "_write", lambda lines: (0, CallLogError("full")))
            lost = log.put(opened("a", "s", [1]))
            with pytest.raises(CallLogError, match="full"):
                await lost
        with pytest.raises(CallLogError, match="before it"):
            await log.put(ended("a", [2]), after=lost)
        kept = log.put(opened("b", "s", [1]))
        await log.put(ended("b", [2]), after=kept)
        log.close()

    asyncio.run(run())
    assert [call.id for call in read(tmp_path).session("s")] == ["b"] and b'"a"' not in (tmp_path / "r0.jsonl").read_bytes()


def test_every_incarnation_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "r0.jsonl").write_text('{"event": "op')
    with pytest.raises(CallLogError, match="exists already"):
        CallLogWriter(tmp_path / "r0.jsonl")


@pytest.mark.parametrize("event", [ended("a", [1], logprobs=[float("nan")]), {"event": "open", "new": {1, 2}}])
def test_what_is_no_json_is_refused_alone(tmp_path: Path, event: dict[str, Any]) -> None:
    async def run() -> None:
        log = CallLogWriter(tmp_path / "r0.jsonl")
        with pytest.raises(CallLogError, match="no JSON"):
            await log.append(event)
        await log.append(opened("b", "s", [1]))
        log.close()

    asyncio.run(run())
    assert [call.id for call in read(tmp_path).session("s")] == ["b"]


def test_a_full_disk_fails_those_it_hits_and_leaves_no_torn_line(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def run() -> None:
        log = CallLogWriter(tmp_path / "r0.jsonl")
        await log.append(opened("first", "s", [1]))
        line = log.path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * line + line // 2, hard))
        try:
            results = await asyncio.gather(*(log.append(opened(f"n{i:03}", "s", [1])) for i in range(20)), return_exceptions=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        failed = [result for result in results if result is not None]
        assert all(isinstance(error, CallLogError) for error in failed)
        written = {json.loads(text)["call"] for text in log.path.read_text().splitlines()}
        assert written == {"first"} | {f"n{i:03}" for i, result in enumerate(results) if result is None}
        assert log.path.read_bytes().endswith(b"\n")
        await log.append(opened("after", "s", [1]))  # there is room again
        log.close()

    asyncio.run(run())
    assert "after" in {call.id for call in read(tmp_path).session("s")}


def test_a_failed_sync_breaks_the_log_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdatasync

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def run() -> None:
        log = CallLogWriter(tmp_path / "r0.jsonl")
        monkeypatch.setattr(os, "fdatasync", fail)
        results = await asyncio.gather(*(log.append(opened(f"c{i}", "s", [1])) for i in range(5)), return_exceptions=True)
        assert all(isinstance(result, CallLogError) for result in results)
        monkeypatch.setattr(os, "fdatasync", real)
        with pytest.raises(CallLogError, match="cannot be synced"):
            await log.append(opened("later", "s", [1]))
        assert log.broken is not None
        log.close()

    asyncio.run(run())


# --- reader


def test_a_call_through_its_life(tmp_path: Path) -> None:
    log = tmp_path / "r0.jsonl"
    events = [opened("a", "s", [1, 2, 3]), ended("a", [4, 5], spans=[["0.1", 0, 1], ["0.2", 1, 2]], version="0.2"), delivery("a")]
    reader = CallLogReader(tmp_path)
    log.touch()
    seen = []
    for event in events:
        with log.open("a") as file:
            file.write(json.dumps(event) + "\n")
        reader.refresh()
        (call,) = reader.session("s")
        seen.append((call.status, call.delivered, call.trainable))
    assert seen == [("open", None, False), ("finished", None, False), ("finished", True, True)]
    assert call.prompt_ids == [1, 2, 3] and call.ids == [4, 5] and call.versions() == ["0.1", "0.2"] and call.temperature == 0.7
    with log.open("a") as file:
        file.write(json.dumps({"event": "superseded", "call": "a", "by": "b", "t": 4.0}) + "\n")
    reader.refresh()
    assert not reader.session("s")[0].trainable


def test_a_call_whose_replica_died_stays_open(tmp_path: Path) -> None:
    write(tmp_path / "dead.jsonl", [opened("a", "s", [1])])
    write(tmp_path / "new.jsonl", [opened("b", "s", [1], replica="r1"), ended("b", [2]), delivery("b")])
    reader = read(tmp_path)
    b, a = reader.session("s")
    assert (a.id, a.status, a.trainable) == ("a", "open", False) and (b.id, b.trainable) == ("b", True)
    assert (reader.state("s").open, reader.state("s").calls) == (1, 1)


def test_order_is_by_completion(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [opened("a", "s", [1], t=1), opened("b", "s", [1], t=2), ended("b", [2], t=3), ended("a", [2], t=4)])
    assert [call.id for call in read(tmp_path).session("s")] == ["b", "a"]


def test_a_chain_of_prompts_across_files(tmp_path: Path) -> None:
    # "a.jsonl" is read first although its call continues one of "z.jsonl".
    write(tmp_path / "z.jsonl", [opened("p", "s", [1, 2, 3]), ended("p", [4, 5])])
    write(tmp_path / "a.jsonl", [opened("q", "s", [9], parent="p", shared=4), opened("r", "s", [8], parent="q", shared=2)])
    prompts = {call.id: call.prompt_ids for call in read(tmp_path).session("s")}
    assert prompts == {"p": [1, 2, 3], "q": [1, 2, 3, 4, 9], "r": [1, 2, 8]}


def test_a_parent_written_between_two_files_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [opened("q", "s", [9], parent="p", shared=1), ended("q", [3]), delivery("q")])
    reader = read(tmp_path)
    write(tmp_path / "a.jsonl", [opened("p", "s", [1])])
    assert {call.id: call.prompt_ids for call in reader.session("s")} == {"p": [1], "q": [1, 9]}
    assert reader.problems == []


def test_a_call_without_its_parent_is_in_quarantine(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [opened("q", "s", [9], parent="p", shared=1), *whole("other", "s"), *whole("o", "t")])
    reader = read(tmp_path)
    assert [(call.id, call.trainable) for call in reader.session("s")] == [("other", False)]
    assert str(reader.problems[0]).startswith(f"{tmp_path}/b.jsonl:1: parent call p is not in the log")
    assert [call.trainable for call in reader.session("t")] == [True]


def test_a_deep_chain_needs_no_deep_stack(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    for i in range(3000):
        events += [opened(f"c{i}", "s", [i], parent=f"c{i - 1}" if i else None, shared=i, t=i), ended(f"c{i}", [], t=i + 0.5)]
    write(tmp_path / "r0.jsonl", events)
    assert read(tmp_path).session("s")[-1].prompt_ids == list(range(3000))


def test_copies_of_a_call_merge(tmp_path: Path) -> None:
    events = [opened("a", "s", [1]), ended("a", [2]), delivery("a")]
    write(tmp_path / "one.jsonl", events)
    write(tmp_path / "two.jsonl", [*events[1:], events[0]])
    reader = read(tmp_path)
    assert len(reader.session("s")) == 1 and reader.state("s").calls == 1
    write(tmp_path / "three.jsonl", [delivery("a", event="undelivered")])
    reader.refresh()
    assert reader.session("s")[0].delivered is False


def test_an_equal_request_at_another_replica_supersedes(tmp_path: Path) -> None:
    events = [opened("a", "s", [1], t=1, request_sha256="same"), ended("a", [2]), delivery("a")]
    write(tmp_path / "one.jsonl", events)
    write(tmp_path / "two.jsonl", [opened("b", "s", [1], t=2, request_sha256="same", replica="r1"), ended("b", [3]), delivery("b")])
    assert {call.id: call.superseded_by for call in read(tmp_path).session("s")} == {"a": "b", "b": None}


def test_state(tmp_path: Path) -> None:
    refused = {"event": "refused", "session": "s", "reason": "overflow", "status": 400, "dialect": "chat", "path": "/", "t": 5.0}
    events = [
        opened("a", "s", [1]),
        ended("a", [2, 3]),
        delivery("a", reply="tool_calls"),
        opened("aux", "s", [1], kind="aux"),
        ended("aux", [4], t=2.5),
        delivery("aux", event="undelivered", reply=None),
        opened("bad", "s", [1], kind="aux"),
        ended("bad", [], event="failed", spans=None),
        refused,
    ]
    write(tmp_path / "r0.jsonl", events)
    reader = read(tmp_path)
    state = reader.state("s")
    assert (state.calls, state.failed, state.open, state.undelivered, state.sampled_tokens, state.refused) == (2, 1, 0, 1, 3, 1)
    assert (state.last_status, state.last_reply, state.overflow, state.closed, state.limit) == ("finished", "tool_calls", True, False, None)
    later = [opened("b", "s", [1]), ended("b", [2], t=6.0, event="length")]
    later += [{"event": "session", "session": "s", "status": "limit", "limit": "calls", "t": 7.0}]
    later += [{"event": "session", "session": "s", "status": "closed", "limit": None, "t": 8.0}]
    write(tmp_path / "r1.jsonl", later)
    reader.refresh()
    state = reader.state("s")
    assert (state.last_status, state.overflow, state.closed, state.limit) == ("length", False, True, "calls")
    assert reader.sessions() == ["s"] and reader.state("unknown").calls == 0
    reader.forget("s")
    assert reader.sessions() == [] and reader.session("s") == []


NO_EVENTS = ['{"event": "open"}', "[1]", "not json", '{"event": "opened", "call": "x"}', "\0\0\0\0", '{"event": "finished", "call": "']
WRONG_EVENTS = [
    json.dumps(ended("ok", [1, 2], spans=[["0.1", 0, 1]])),
    json.dumps(ended("ok", [1, 2], logprobs=[-1.0])),
    json.dumps(ended("ok", [1, 2], logprobs=["x", "y"])),
    json.dumps(ended("ok", [1, 2]))[:-9],
    json.dumps(opened("a", "s", [2**40])),
    json.dumps(opened("a", "s", [1], parent="p", shared=0)),
    json.dumps(opened("a", "s", [1]) | {"event": "opened"}),
    json.dumps({"event": "session", "session": "s", "status": "sleeping", "limit": None, "t": 1}),
]


@pytest.mark.parametrize("line", [*NO_EVENTS, *WRONG_EVENTS])
def test_a_wrong_line_is_named_and_its_session_is_in_quarantine(tmp_path: Path, line: str) -> None:
    file = tmp_path / "r0.jsonl"
    over = [*whole("first", "over"), {"event": "session", "session": "over", "status": "closed", "limit": None, "t": 5.0}]
    before, after = [*over, opened("ok", "s", [1])], [*whole("later", "s"), *whole("new", "t")]
    file.write_text("".join(json.dumps(event) + "\n" for event in before) + line + "\n" + "".join(json.dumps(e) + "\n" for e in after))
    write(tmp_path / "r1.jsonl", whole("elsewhere", "u"))
    reader = read(tmp_path)
    (problem,) = reader.verify()
    assert (problem.file, problem.line, problem.sessions) == (file, 6, ("s",)) and str(problem).startswith(f"{file}:6: ")
    assert reader.quarantined("s") is problem and reader.quarantined("t") is None
    assert {call.id: call.trainable for call in reader.session("s")} == {"ok": False, "later": False}
    for session in ("over", "t", "u"):
        assert [call.trainable for call in reader.session(session)] == [True]
    reader.refresh()
    assert reader.verify() == [problem]


def test_contradictions_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [opened("a", "s", [1]), ended("a", [1]), ended("a", [2])])
    assert "a.jsonl:3: call a ended twice" in str(read(tmp_path).verify()[0])
    write(tmp_path / "a.jsonl", [opened("a", "s", [1]), opened("b", "other", [1], parent="a", shared=1)])
    assert "not in the log of session other" in str(read(tmp_path).verify()[0])
    write(tmp_path / "a.jsonl", [opened("a", "s", [1]), opened("b", "s", [1], parent="a", shared=2)])
    assert "shares 2 tokens" in str(read(tmp_path).verify()[0])
    write(tmp_path / "a.jsonl", [opened("a", "s", [1]), opened("a", "s", [2])])
    assert "opened differently" in str(read(tmp_path).verify()[0])


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [opened("a", "s", [1]), ended("a", [1])])
    reader = read(tmp_path)
    write(tmp_path / "a.jsonl", [opened("a", "s", [1])])
    reader.refresh()
    assert "shrank" in str(reader.problems[0]) and reader.quarantined("s") is not None
    assert not any(call.trainable for call in reader.session("s"))


def test_a_torn_tail_is_reported_once_its_writer_is_gone(tmp_path: Path) -> None:
    async def run() -> None:
        log = CallLogWriter(tmp_path / "r0.jsonl")
        await log.append(opened("a", "s", [1, 2]))
        with log.path.open("ab") as file:
            file.write(b'{"event":"finis')
        reader = read(tmp_path)
        assert reader.torn() == []  # it may be about to become whole
        log.close()
        (tail,) = reader.torn()
        assert (tail.file, tail.bytes) == (log.path, 15)
        assert [call.id for call in reader.session("s")] == ["a"] and reader.problems == []

    asyncio.run(run())


# --- properties: random sessions, random interleavings, any cut


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
            _is_part_of(call, expected[call.id], happened[call.id])
    (directory / "r0.jsonl").write_bytes(content)  # the rest arrives
    reader.refresh()
    for name, events in {event["call"]: [e["event"] for e in order if e["call"] == event["call"]] for event in order}.items():
        (call,) = (c for c in reader.session(expected[name].session) if c.id == name)
        _is_part_of(call, expected[name], events)


def _is_part_of(call: Call, whole: Call, happened: list[str]) -> None:
    assert call.prompt_ids == whole.prompt_ids and call.session == whole.session
    end = [event for event in happened if event in ("finished", "length", "cancelled", "failed")]
    assert call.status == (end[0] if end else "open")
    assert call.ids == (whole.ids if end else []) and len(call.logprobs) == len(call.ids)
    if "delivered" not in happened and "undelivered" not in happened:
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


def test_the_log_grows_with_new_tokens_only(tmp_path: Path) -> None:
    def size(turns: int) -> int:
        history = list(range(1000, 3000))
        previous: list[int] = []
        events: list[dict[str, Any]] = []
        for turn in range(turns):
            ids = [turn] * 20
            parent = f"c{turn - 1}" if turn else None
            events.append(opened(f"c{turn}", "s", history[len(previous) :], parent=parent, shared=len(previous), t=turn))
            events += [ended(f"c{turn}", ids, t=turn + 0.5), delivery(f"c{turn}")]
            previous = history + ids
            history = [*previous, *range(30)]
        directory = tmp_path / str(turns)
        directory.mkdir()
        write(directory / "r0.jsonl", events)
        calls = read(directory).session("s")
        assert len(calls[-1].prompt_ids) == 2000 + 50 * (turns - 1)
        return (directory / "r0.jsonl").stat().st_size

    ten, twenty, forty = size(10), size(20), size(40)
    assert forty - twenty < 2.1 * (twenty - ten)
