"""Compaction: whatever is moved, whenever, and wherever it is cut short, a reader sees the same log."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogReader, CallLogWriter, SessionState
from forge_ray.trajectories.call_log.compactor import Compacted, Compactor
from forge_ray.trajectories.call_log.segments import segments
from forge_ray.trajectories.call_log.table import CONTENT_KEY, VERSION_KEY
from tests.unit.log_events import delivery, ended, opened, read, whole, write


def closed(session: str, t: float = 9.0) -> dict[str, Any]:
    return {"event": "session", "session": session, "status": "closed", "limit": None, "t": t}


def refused(session: str, t: float, reason: str = "overflow") -> dict[str, Any]:
    return {"event": "refused", "session": session, "reason": reason, "status": 400, "dialect": "chat", "path": "/", "t": t}


def compactor(directory: Path) -> Compactor:
    return Compactor(directory, quiet_s=0)


def contents(reader: CallLogReader) -> dict[str, tuple[list[Call], SessionState, list[Any]]]:
    reader.refresh()
    assert reader.problems == []
    return {name: (reader.session(name), reader.state(name), reader.upstream(name)) for name in sorted(reader.sessions())}


def rows(directory: Path, kind: str = "call") -> list[dict[str, Any]]:
    found = [row for part in sorted((directory / "parquet").glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]
    return [row for row in found if row["row"] == kind]


def passed(call: str, session: str, t: float) -> dict[str, Any]:
    """A call that another model answered."""
    texts = {name: "x" for name in ("purpose", "upstream", "model", "dialect", "path", "kind")}
    return {
        **{"event": "upstream", "call": call, "session": session, "t": t, "opened": t - 1, **texts, "streamed": False},
        **{"request": {"messages": [{"role": "user", "content": "ü"}]}, "reply": {"text": "x"}, "status": "finished", "http_status": 200},
    }


EVERYTHING = [
    opened("a", "s", [1, 2, 3], splice="new", ignored=["store"], model="policy", stranger={"x": [1, None]}),
    ended("a", [4, 5], spans=[["0.1", 0, 1], ["0.2", 1, 2]], stop_reason="Observation:"),
    delivery("a") | {"issued": ["call_1"], "usage": {"total_tokens": 5}},
    opened(
        "b", "s", [7], parent="a", shared=5, splice="spliced", reason="r", rerendered=[4, 6], spawned_by="a", sampling={"temperature": 0.1}
    ),
    {"event": "kind", "call": "b", "kind": "compaction", "t": 3.5},
    ended("b", [8], event="cancelled", spans=None, stop_reason=151645, logprobs=[-0.1 - 1e-17]),
    delivery("b", event="undelivered", reply=None) | {"first_byte_s": None},
    opened("lost", "s", [1]),
    refused("s", 5.0),
    refused("s", 5.5, "field"),
    passed("u", "s", 6.0),
    {"event": "delivered", "call": "u", "session": "s", "t": 6.1, "response_sha256": "d", "bytes": 5, "status": 200},
    {"event": "session", "session": "s", "status": "limit", "limit": "calls", "t": 7.0},
    closed("s"),
]


def test_nothing_that_was_logged_is_lost(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", EVERYTHING)
    before = contents(CallLogReader(tmp_path))
    kept = read(tmp_path)
    done = compactor(tmp_path).run()
    assert (done.sessions, done.calls, done.removed) == (1, 3, ["r0.jsonl"]) and list(tmp_path.glob("*.jsonl")) == []
    assert contents(CallLogReader(tmp_path)) == before == contents(kept)
    calls, state, upstream = before["s"]
    assert [call.id for call in calls] == ["a", "b", "lost"] and state.refused_by == {"r0": 2}
    assert (upstream[0].reply["text"], upstream[0].delivered) == ("x", True)
    # The same events come back, what no column is for included.
    reader = CallLogReader(tmp_path)
    reader.refresh()
    assert (reader._events("s").calls["a"].open or {})["stranger"] == {"x": [1, None]}


def test_the_columns_say_what_the_schema_says(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", EVERYTHING)
    compactor(tmp_path).run()
    (file,) = (tmp_path / "parquet").iterdir()
    assert pq.read_schema(file).metadata[b"forge_ray.calls"] == b"1"
    a, b, lost = rows(tmp_path)
    assert (a["new"], a["ids"], a["logprobs"], a["parent"], a["shared"]) == ([1, 2, 3], [4, 5], [-0.5, -0.5], None, 0)
    assert a["spans"] == [{"version": "0.1", "first": 0, "end": 1}, {"version": "0.2", "first": 1, "end": 2}]
    assert (a["status"], a["delivered"], json.loads(a["stop_reason"]), a["issued"]) == ("finished", True, "Observation:", ["call_1"])
    assert (b["parent"], b["shared"], b["new"], b["rerendered"], b["kind"], b["kind_seen"]) == ("a", 5, [7], [4, 6], "agent", "compaction")
    assert (b["logprobs"], b["spans"], b["delivered"], lost["status"], lost["ids"]) == ([-0.1 - 1e-17], None, False, None, None)
    assert sorted(row["event"] for row in rows(tmp_path, "event")) == [
        *("delivered", "refused", "refused", "session", "session", "upstream")
    ]


def test_what_earlier_writers_said_of_retries_is_passed_over(tmp_path: Path) -> None:
    said = {"event": "superseded", "call": "a", "by": "b", "t": 4.0}
    write(tmp_path / "r0.jsonl", [*whole("a", "s"), said, closed("s")])
    compactor(tmp_path).run()
    (file,) = (tmp_path / "parquet").iterdir()
    part, content = pq.read_table(file), pq.read_metadata(file).metadata
    for column, value in (("superseded_by", "b"), ("superseded_t", 4.0)):
        part = part.append_column(column, pa.array([value] * part.num_rows))
    pq.write_table(part.replace_schema_metadata({key: content[key] for key in (VERSION_KEY, CONTENT_KEY)}), file)
    write(tmp_path / "r1.jsonl", [said])
    assert [call.trainable for call in contents(CallLogReader(tmp_path))["s"][0]] == [True]
    assert compactor(tmp_path).run().removed == ["r1.jsonl"] and len(list((tmp_path / "parquet").iterdir())) == 1


def test_what_is_not_over_stays(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [*whole("a", "over"), *whole("b", "open"), closed("over")])
    assert contents(read(tmp_path)).keys() == {"over", "open"}
    patient = Compactor(tmp_path, quiet_s=0, idle_s=1e12)
    assert patient.run() == Compacted()  # one session of the segment is still open
    write(tmp_path / "r0.0001.jsonl", [closed("open")])
    assert sorted(patient.run().removed) == ["r0.0001.jsonl", "r0.jsonl"]
    assert sorted(contents(read(tmp_path))) == ["open", "over"] and len(rows(tmp_path)) == 2


async def test_a_living_replicas_newest_segment_and_running_calls_stay(tmp_path: Path) -> None:
    log = CallLogWriter(tmp_path / "r0.jsonl", segment_bytes=700)
    for event in [*whole("a", "s"), closed("s"), *whole("b", "t")]:
        await log.append(event)
    segments = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert len(segments) > 1 and log.path.name == max(segments, key=len)
    done = compactor(tmp_path).run()
    assert log.path.name not in done.removed and log.path.exists()
    await log.append(opened("c", "running", [1]))
    while len(list(tmp_path.glob("*.jsonl"))) < 3:
        await log.append(refused("filler", 1.0))
    await log.append(closed("running"))
    await log.append(closed("filler"))
    still = Compactor(tmp_path, quiet_s=0, idle_s=1e12).run()
    reader = read(tmp_path)
    assert [call.status for call in reader.session("running")] == ["open"]
    assert any(b'"running"' in path.read_bytes() and b'"open"' in path.read_bytes() for path in tmp_path.glob("*.jsonl")), still
    await log.append(ended("c", [2]))
    log.close()
    compactor(tmp_path).run()
    assert list(tmp_path.glob("*.jsonl")) == []
    assert [call.status for call in read(tmp_path).session("running")] == ["finished"] and len(rows(tmp_path)) == 3


def test_what_is_logged_after_a_session_was_moved_is_moved_later(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [*whole("a", "s"), opened("b", "s", [1]), closed("s")])
    same = compactor(tmp_path)
    assert same.run().calls == 2
    late = [ended("b", [5]), delivery("b"), {"event": "kind", "call": "a", "kind": "aux", "t": 7.0}, refused("s", 8.0)]
    write(tmp_path / "r1.jsonl", late)
    after = contents(CallLogReader(tmp_path))
    a, b = after["s"][0]
    assert (a.kind, b.ids, b.delivered, after["s"][1].refused) == ("aux", [5], True, 1)
    for _ in range(2):
        same.run()
        compactor(tmp_path).run()
    assert list(tmp_path.glob("*.jsonl")) == [] and contents(CallLogReader(tmp_path)) == after
    assert sorted(row["call"] for row in rows(tmp_path)) == ["a", "b"]
    assert sorted(row["event"] for row in rows(tmp_path, "event")) == ["delivered", "finished", "kind", "refused", "session"]


def test_events_of_a_call_that_was_never_opened_hold_nothing_up(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [ended("ghost", [1]), *whole("a", "s"), closed("s")])
    assert compactor(tmp_path).run().removed == ["r0.jsonl"]
    assert list(contents(read(tmp_path))) == ["s"]


def test_evidence_stays(tmp_path: Path) -> None:
    (tmp_path / "r0.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [*whole("a", "s"), closed("s")]) + "rubbish\n")
    write(tmp_path / "r1.jsonl", [*whole("b", "t"), ended("b", [9]), closed("t")])
    write(tmp_path / "r2.jsonl", [*whole("c", "u"), closed("u")])
    with (tmp_path / "r2.jsonl").open("a") as file:
        file.write('{"event": "deli')
    for _ in range(2):
        compactor(tmp_path).run()
        assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["r0.jsonl", "r1.jsonl"]
    reader = read(tmp_path)
    assert len(reader.verify()) == 2 and not reader.session("t")[0].trainable and reader.session("u")[0].trainable
    assert [(tail.file.name, tail.bytes) for tail in reader.torn()] == [("r2.jsonl", 15)]


@pytest.mark.parametrize("step", ["write", "rename", "read back", "first unlink", "second unlink"])
def test_a_compaction_that_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    write(tmp_path / "r0.jsonl", [*whole("a", "s"), opened("b", "s", [1])])
    write(tmp_path / "r0.0001.jsonl", [ended("b", [2]), refused("s", 5.0), *whole("c", "t"), closed("s"), closed("t")])
    before, during = contents(CallLogReader(tmp_path)), read(tmp_path)
    half = CallLogReader(tmp_path)
    half._lines._follow(segments(tmp_path)[0])

    class Cut(BaseException):
        pass

    from forge_ray.trajectories.call_log import table

    unlinks = 0
    real_unlink, real_rename = Path.unlink, os.rename

    def unlink(path: Path, missing_ok: bool = False) -> None:
        nonlocal unlinks
        if path.suffix == ".jsonl":
            unlinks += 1
            if (step, unlinks) in (("first unlink", 1), ("second unlink", 2)):
                raise Cut
        real_unlink(path, missing_ok=missing_ok)

    def cut(*_: Any, **__: Any) -> None:
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        patch.setattr(table.PartWriter, "abandon", lambda self: None)  # a killed process cleans nothing up
        if step == "write":
            patch.setattr(table.PartWriter, "_flush", cut)
        elif step == "rename":
            patch.setattr(os, "rename", cut)
        elif step == "read back":
            patch.setattr(os, "rename", lambda *names: (real_rename(*names), cut()))
        with pytest.raises(Cut):
            compactor(tmp_path).run()
    for reader in (CallLogReader(tmp_path), during, half):
        assert contents(reader) == before
    compactor(tmp_path).run()
    assert list(tmp_path.glob("*.jsonl")) == [] and list((tmp_path / "parquet").glob(".*")) == []
    for reader in (CallLogReader(tmp_path), during, half):
        assert contents(reader) == before
    assert sorted(row["call"] for row in rows(tmp_path)) == ["a", "b", "c"]


def test_one_compaction_at_a_time(tmp_path: Path) -> None:
    import fcntl

    write(tmp_path / "r0.jsonl", [*whole("a", "s"), closed("s")])
    with (tmp_path / ".compact.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert compactor(tmp_path).run() == Compacted()
    assert compactor(tmp_path).run().calls == 1


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "r0.jsonl", [*whole("a", "s"), closed("s")])
    write(tmp_path / "r1.jsonl", whole("b", "t"))
    part = Compactor(tmp_path, quiet_s=0, idle_s=1e12).run().part
    assert part is not None
    reader = read(tmp_path)
    content = part.read_bytes()
    part.write_bytes(b"\0" * 64 + content[64:])
    assert reader.session("s") == [] or not reader.session("s")[0].trainable
    part.write_bytes(content[:-40])
    fresh = read(tmp_path)
    assert [problem.file for problem in fresh.problems] == [part] and fresh.session("t")[0].trainable


def test_no_flipped_byte_of_a_part_changes_what_is_trained(tmp_path: Path) -> None:
    for number, session in enumerate("stu"):
        chance = random.Random(session)
        ids = [chance.randrange(50_000) for _ in range(300)]
        events = [opened(session, session, ids), ended(session, ids[:100], logprobs=[-chance.random() for _ in range(100)])]
        write(tmp_path / f"r{number}.jsonl", [*events, delivery(session), closed(session)])
    part = compactor(tmp_path).run().part
    assert part is not None

    def trained() -> set[tuple[Any, ...]]:
        reader = read(tmp_path)
        calls = [call for session in reader.sessions() for call in reader.session(session) if call.trainable]
        return {(*call.prompt_ids, *call.ids, *call.logprobs) for call in calls}

    content, right = part.read_bytes(), trained()
    assert len(right) == 3
    for at in range(2, len(content), 149):
        part.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        assert trained() <= right, at


def test_the_log_is_bounded_and_parquet_is_smaller(tmp_path: Path) -> None:
    async def run() -> None:
        log, moving = (
            CallLogWriter(tmp_path / "r0.jsonl", segment_bytes=300_000),
            Compactor(tmp_path, grace_s=0, quiet_s=0, least_bytes=150_000),
        )
        chance = random.Random(0)
        written = largest = 0
        for number in range(150):
            for turn in range(5):
                ids = [chance.randrange(50_000) for _ in range(120)]
                logprobs = [-chance.expovariate(1) for _ in ids]
                call = f"c{number}-{turn}"
                events = [opened(call, f"s{number}", ids[:60]), ended(call, ids, logprobs=logprobs), delivery(call)]
                await asyncio.gather(*(log.append(event) for event in events))
                written += sum(len(json.dumps(event, separators=(",", ":"))) + 1 for event in events)
            await log.append(closed(f"s{number}"))
            moving.run()
            largest = max(largest, sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")))
        log.close()
        assert written > 4 * largest
        size = sum(path.stat().st_size for path in (tmp_path / "parquet").iterdir())
        assert size < written / 2, (size, written)

    asyncio.run(run())
    assert sum(len(read(tmp_path).session(f"s{number}")) for number in range(150)) == 750


# --- any history, any moments of compaction, any reader


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[str, dict[str, Any]]]:
    """(replica, event) in the order of writing: sessions over one or two replicas, every kind of event, some calls lost."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    queues: list[list[tuple[str, dict[str, Any]]]] = []
    for s in range(draw(st.integers(1, 4))):
        session, queue, previous, length = f"s{s}", [], None, 0
        for c in range(draw(st.integers(0, 4))):
            call, replica, t = f"s{s}c{c}", chance.choice(["r0", "r1"]), 10.0 * c
            shared = chance.randint(1, length) if previous is not None and length else 0
            start = opened(call, session, [c], parent=previous if shared else None, shared=shared, t=t, replica=replica)
            queue.append((replica, start | {"request_sha256": chance.choice(["same", call])}))
            if chance.random() < 0.8:
                ids = [chance.randrange(9) for _ in range(chance.randint(0, 3))]
                queue.append((replica, ended(call, ids, t=t + 1)))
                previous, length = call, shared + 1 + len(ids)
                if chance.random() < 0.8:
                    queue.append((replica, delivery(call, event=chance.choice(["delivered", "undelivered"]))))
            if chance.random() < 0.3:
                queue.append((replica, refused(session, t + 3)))
            if chance.random() < 0.2:
                queue.append((replica, {"event": "kind", "call": call, "kind": "aux", "t": t + 4}))
            if chance.random() < 0.2:
                queue.append((replica, passed(f"u{call}", session, t)))
        if chance.random() < 0.8:
            queue += [(replica, closed(session, 90.0)) for replica in ("r0", "r1")]
        if chance.random() < 0.3 and previous is not None:
            queue.append((chance.choice(["r0", "r1"]), {"event": "superseded", "call": previous, "by": "z", "t": 95.0}))
        queues.append(queue)
    order = []
    while any(queues):
        order.append(chance.choice([queue for queue in queues if queue]).pop(0))
    return order


@settings(deadline=None, max_examples=60)
@given(logs(), st.integers(0, 2**32))
def test_a_reader_sees_the_same_log_whatever_is_compacted_meanwhile(
    tmp_path_factory: pytest.TempPathFactory, log: list[tuple[str, dict[str, Any]]], seed: int
) -> None:
    chance, plain, moved = random.Random(seed), tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("moved")
    following, compactors = CallLogReader(moved), [compactor(moved), Compactor(moved, quiet_s=0, idle_s=1e12)]
    numbers = {"r0": 0, "r1": 0}
    for replica, event in log:
        line = json.dumps(event, separators=chance.choice([(",", ":"), (", ", ": ")])) + "\n"
        with (plain / f"{replica}.jsonl").open("a") as file:
            file.write(line)
        if chance.random() < 0.3:
            numbers[replica] += 1
        name = f"{replica}.{numbers[replica]:04d}.jsonl" if numbers[replica] else f"{replica}.jsonl"
        with (moved / name).open("a") as file:
            file.write(line)
        if chance.random() < 0.3:
            following.refresh()
        if chance.random() < 0.3:
            # Names the replicas that live: their newest segments are being written.
            chance.choice([*compactors, compactor(moved)]).run(alive=("r0", "r1"))
    expected = contents(CallLogReader(plain))
    assert contents(CallLogReader(moved)) == expected == contents(following)
    compactor(moved).run()
    assert contents(CallLogReader(moved)) == expected == contents(following)
    calls = [row["call"] for row in rows(moved)]
    assert sorted(calls) == sorted(call.id for found, _, _ in expected.values() for call in found)
