"""What a replica learns of the sessions of others: out of their files, when it meets the session, and exactly once."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Limits
from forge_ray.serve_proxy.client import merge
from forge_ray.serve_proxy.recovery import Recovery
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.trajectories.call_log import CallLogReader, CallLogWriter
from forge_ray.trajectories.call_log.compactor import Compactor
from tests.unit.log_events import delivery, ended, opened, whole, write
from tests.unit.test_compaction import closed, refused

LIMITS = Limits(calls=3)


def replica(directory: Path, name: str = "r1", *, alone: bool = False) -> tuple[SessionIndex, Recovery]:
    index = SessionIndex(name, LIMITS)
    return index, Recovery(index, directory, alone=alone)


async def test_a_session_goes_on_where_another_replica_left_it(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [*whole("a", "s", [1, 2], [3]), *whole("x", "other"), refused("s", 4.0, "field")])
    index, recovery = replica(tmp_path)
    await recovery.meet("s")
    assert index.sessions() == ["s"]
    placed = index.place("s", [1, 2, 3, 9], "b")
    assert (placed.parent, placed.shared) == ("a", 3)
    assert index.state("s").counts["r0"].refused == 1 and index.exhausted("s") is None
    index.place("s", [1], "c")
    assert index.exhausted("s") == "calls"


async def test_more_of_another_replica_is_taken_in_once(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [opened("a", "s", [1, 2])])
    index, recovery = replica(tmp_path)
    await recovery.meet("s")
    assert index.state("s").counts["r0"].live == 1
    index.place("s", [7], "own")
    write(tmp_path / "r1.jsonl", [opened("own", "s", [7], replica="r1")])
    follow = [opened("b", "s", [5], parent="own", shared=1), ended("b", [6]), delivery("b")]
    with (tmp_path / "r0.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in [ended("a", [3, 4]), delivery("a"), *follow])
    for _ in range(2):
        await asyncio.gather(*(recovery.meet("s") for _ in range(5)))
        counts = index.state("s").counts
        assert (counts["r0"].started, counts["r0"].calls, counts["r0"].live, counts["r0"].sampled_tokens) == (2, 2, 0, 3)
        assert counts["r1"].started == 1 and set(index.state("s").tree.calls) == {"a", "b", "own"}
    assert (index.place("s", [1, 2, 3, 4, 9], "next").parent, index.state("s").tree.calls["a"].delivered) == ("a", True)


async def test_alone_a_session_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[str]] = []
    real = Recovery._look
    monkeypatch.setattr(Recovery, "_look", lambda self, sessions: (looks.append(sessions), real(self, sessions))[1])
    index, recovery = replica(tmp_path, alone=True)
    for _ in range(3):
        await recovery.meet("s")
    await asyncio.gather(*(recovery.meet(f"t{i}") for i in range(50)))
    assert looks[0] == ["s"] and len(looks) <= 3 and index.sessions() == []


async def test_who_asks_while_a_look_is_under_way_sees_what_was_logged_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, go_on = threading.Event(), threading.Event()
    real = CallLogReader.refresh

    def slow(self: CallLogReader) -> None:
        real(self)
        passed.set()
        assert go_on.wait(60)

    monkeypatch.setattr(CallLogReader, "refresh", slow)
    index, recovery = replica(tmp_path)
    first = asyncio.create_task(recovery.meet("first"))
    await asyncio.to_thread(passed.wait, 60)
    write(tmp_path / "r0.jsonl", whole("a", "s"))
    second = asyncio.create_task(recovery.meet("s"))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, second)
    assert index.sessions() == ["s"]


async def test_a_session_that_another_replica_closed_is_closed_here(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [*whole("a", "old"), closed("old"), *whole("b", "moved"), closed("moved"), *whole("c", "open")])
    Compactor(tmp_path, quiet_s=0).run()
    assert list(tmp_path.glob("*.jsonl")) == []
    index, recovery = replica(tmp_path)
    write(tmp_path / "r2.jsonl", [*whole("d", "new"), closed("new", 4e9)])
    for session in ("old", "moved", "new", "open"):
        await recovery.meet(session)
        assert index.closed(session) == (session != "open")


async def test_long_closed_sessions_are_forgotten_and_can_still_be_closed_again(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [*whole("a", "s"), opened("lost", "s", [1]), closed("s")])
    index, recovery = replica(tmp_path)
    await recovery.start()
    assert not recovery._reader.knows("s") and index.sessions() == []
    await recovery.close("s")
    summary = merge("s", [{"replica": "r1", **index.state("s").report()}])
    assert (summary.calls, summary.failed, summary.last_status) == (1, 1, "finished")


async def test_closing_reports_the_calls_of_the_dead_and_leaves_the_living_theirs(tmp_path: Path) -> None:
    living = CallLogWriter(tmp_path / "living.jsonl")
    for event in whole("a", "s"):
        await living.append({**event, **({"replica": "living"} if "replica" in event else {})})
    index, recovery = replica(tmp_path)
    await recovery.close("s")
    assert index.sessions() == []
    write(tmp_path / "dead.jsonl", [*whole("b", "s"), opened("c", "s", [1])])
    for event in (tmp_path / "dead.jsonl").read_text().splitlines():
        assert json.loads(event).get("replica") in (None, "r0")
    await recovery.close("s")
    report: dict[str, Any] = {"replica": "r1", **index.state("s").report()}
    own = {"session": "s", "replica": "living", "limit": None, "counts": {"living": report["counts"]["living"]}}
    summary = merge("s", [report, own])
    assert (summary.calls, summary.failed) == (2, 1)
    living.close()


async def test_what_is_wrong_is_told_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "r0.jsonl", whole("a", "s"))
    with (tmp_path / "r0.jsonl").open("a") as file:
        file.write('rubbish\n{"event": "torn')
    write(tmp_path / "r2.jsonl", whole("b", "t", [1, 2], [3]))
    index, recovery = replica(tmp_path)
    await recovery.start()
    assert "r0.jsonl:4: no event of a call log (quarantined: s)" in caplog.text and "r0.jsonl: 15 bytes" in caplog.text
    assert recovery.report()["log_problems"] == 1
    for session in ("s", "t"):
        await recovery.meet(session)
    assert index.place("t", [1, 2, 3, 4], "c").parent == "b"


async def test_of_sessions_closed_long_ago_the_index_keeps_the_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_ray.serve_proxy import session_index

    monkeypatch.setattr(session_index, "HELD", 3)
    for alone in (True, False):
        directory = tmp_path / str(alone)
        directory.mkdir()
        index, recovery = replica(directory, alone=alone)
        events = [{**event, **({"replica": "r1"} if "replica" in event else {})} for n in range(6) for event in whole(f"c{n}", f"s{n}")]
        write(directory / "r1.jsonl", [*events, *(closed(f"s{n}") for n in range(6))])
        for number in range(6):
            await recovery.meet(f"s{number}")
            index.place(f"s{number}", [1, 2], f"c{number}")
            index.end(f"s{number}", f"c{number}", [3], "finished", "agent", 2.0)
            await recovery.close(f"s{number}")
            index.close(f"s{number}")
        assert index.sessions() == ["s3", "s4", "s5"] and all(index.closed(f"s{number}") for number in range(6))
        for number in range(6):  # closed once more: the answer is the same
            await recovery.close(f"s{number}")
            assert not index.close(f"s{number}")
            summary = merge(f"s{number}", [{"replica": "r1", **index.state(f"s{number}").report()}])
            assert (summary.calls, summary.last_status, summary.failed) == (1, "finished", 0)
        assert len(index.sessions()) == 3
