"""The call log's reader: calls and sessions as the files tell them; what is wrong is named and leaves its session in quarantine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forge_ray.trajectories.call_log import CallLogReader, CallLogWriter
from tests.unit.log_events import delivery, ended, opened, read, whole, write


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


def test_what_earlier_writers_said_of_retries_is_passed_over(tmp_path: Path) -> None:
    said = [{"event": "superseded", "call": name, "by": "b", "t": 4.0} for name in ("a", "nobody")]
    write(tmp_path / "r0.jsonl", [*whole("a", "s"), *said])
    reader = read(tmp_path)
    assert reader.verify() == [] and [call.trainable for call in reader.session("s")] == [True]


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


def test_of_equal_requests_the_last_counts_whichever_replica_died(tmp_path: Path) -> None:
    """A replica that is killed under a repeated request leaves no word of what that replaced."""
    events = [opened("a", "s", [1], t=1, request_sha256="same"), ended("a", [2]), delivery("a")]
    write(tmp_path / "one.jsonl", [*events, opened("b", "s", [1], t=2, request_sha256="same")])
    write(tmp_path / "two.jsonl", [opened("c", "s", [1], t=3, request_sha256="same", replica="r1"), ended("c", [3]), delivery("c")])
    calls = {call.id: call for call in read(tmp_path).session("s")}
    assert {call.id: call.superseded_by for call in calls.values()} == {"a": "b", "b": "c", "c": None}
    assert [name for name, call in calls.items() if call.trainable] == ["c"]


def test_equal_requests_that_both_went_on_are_no_retries(tmp_path: Path) -> None:
    """Two sub-agents that are started alike, while a third such request is given up by its harness."""
    events = []
    for number, name in enumerate("abc"):
        events += [opened(name, "s", [1], t=number, request_sha256="same"), ended(name, [2 + number], t=5 + number), delivery(name)]
    write(tmp_path / "r0.jsonl", events)
    assert [call.superseded_by for call in read(tmp_path).session("s")] == ["b", "c", None]
    for name, parent, t in (("d", "a", 10), ("e", "b", 11)):
        events += [opened(name, "s", [7], parent=parent, shared=2, t=t), ended(name, [8], t=t + 5), delivery(name)]
    write(tmp_path / "r0.jsonl", events)
    calls = {call.id: call for call in read(tmp_path).session("s")}
    assert {name: call.superseded_by for name, call in calls.items()} == dict.fromkeys("abde") | {"c": "b"}
    assert [name for name, call in calls.items() if call.trainable] == ["a", "b", "d", "e"]


@pytest.mark.parametrize("goes_on", [False, True])
def test_calls_behind_one_request_are_replaced_together(tmp_path: Path, goes_on: bool) -> None:
    """Tools that the server runs: each call goes on from the one before it. The second such request is a retry, or another sub-agent."""
    events = []
    for number, name in enumerate("ab"):
        events += [opened(f"{name}1", "s", [1], t=10 * number, request_sha256="same"), ended(f"{name}1", [2 + number])]
        events += [opened(f"{name}2", "s", [7], parent=f"{name}1", shared=2, t=10 * number + 2, request_sha256="same")]
        events += [ended(f"{name}2", [4 + number]), delivery(f"{name}1"), delivery(f"{name}2")]
    if goes_on:
        events += [opened("c", "s", [8], parent="a2", shared=4, t=30, request_sha256="other")]
    write(tmp_path / "r0.jsonl", events)
    calls = {call.id: call for call in read(tmp_path).session("s")}
    kept, replaced = "ab" if goes_on else "ba"
    assert sorted(name for name, call in calls.items() if call.trainable) == [f"{kept}1", f"{kept}2"]
    assert calls[f"{replaced}1"].superseded_by == calls[f"{replaced}2"].superseded_by == f"{kept}2"


@pytest.mark.parametrize("told", [None, "undelivered"])
@pytest.mark.parametrize(("shared", "status", "arrived"), [(2, "finished", True), (1, "finished", False), (2, "cancelled", False)])
def test_a_reply_that_a_prompt_goes_on_from_has_arrived(tmp_path: Path, told: str | None, shared: int, status: str, arrived: bool) -> None:
    """The replica died before it could say so, or the client closed its connection before it had read the end."""
    events = [opened("a", "s", [1]), ended("a", [2], event=status)]
    events += [] if told is None else [delivery("a", event=told)]
    events += [opened("b", "s", [7], parent="a", shared=shared, t=3)]
    write(tmp_path / "r0.jsonl", events)
    first = read(tmp_path).session("s")[0]
    assert (first.delivered is True, first.trainable) == (arrived, arrived)


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
