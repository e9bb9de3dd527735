"""The log beside a run: compaction in its thread, and what the driver and `forge-ray check` say of a damaged log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from forge_ray.cli import check_log
from forge_ray.job import compaction
from forge_ray.job.compaction import Compaction
from forge_ray.job.library import Recordings
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir
from forge_ray.trajectories.call_log import CallLogReader, CallLogWriter
from tests.unit.log_events import whole, write
from tests.unit.making import make_record
from tests.unit.test_compaction import closed


async def _filled(run: RunDir) -> CallLogWriter:
    log = CallLogWriter(run.calls / "r0.jsonl", segment_bytes=20_000)
    for number in range(60):
        for event in [*whole(f"c{number}", f"s{number}", list(range(100)), list(range(50))), closed(f"s{number}")]:
            await log.append(event)
    return log


async def test_full_segments_are_compacted_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PAUSE_S", 0.0)
    run = RunDir(tmp_path).create()
    log = await _filled(run)
    before = len(list(run.calls.glob("*.jsonl")))
    assert before > 3
    records: list[RolloutRecord] = [make_record(f"s{number}", 1.0) for number in range(60)]
    recordings = Recordings(run)
    recordings.with_calls(records[:30])
    beside = Compaction(run.calls, 20_000)
    beside.kick(["r0"])
    beside.wait(60)
    assert len(list(run.calls.glob("*.jsonl"))) < before and log.path.exists()
    for event in [*whole("late", "s60"), closed("s60")]:
        await log.append(event)
    for found in (
        recordings.with_calls([*records, make_record("s60", 1.0)]),
        Recordings(run).with_calls([*records, make_record("s60", 1.0)]),
    ):
        assert [len(calls) for _, calls in found] == [1] * 61 and all(call.trainable for _, calls in found for call in calls)
    log.close()


async def test_nothing_is_begun_where_nothing_is_full(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    write(run.calls / "r0.jsonl", [*whole("a", "s"), closed("s")])
    beside = Compaction(run.calls, 20_000)
    beside.kick(["r0"])
    assert beside._thread is None


async def test_a_compaction_that_fails_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from forge_ray.trajectories.call_log import table

    monkeypatch.setattr(compaction, "PAUSE_S", 0.0)
    run = RunDir(tmp_path).create()
    (await _filled(run)).close()
    beside = Compaction(run.calls, 20_000)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(table.PartWriter, "_flush", full)
        beside.kick([])
        beside.wait(60)
    assert "No space left on device" in caplog.text and list((run.calls / "parquet").iterdir()) == []
    beside.kick([])
    beside.wait(60)
    assert len(list((run.calls / "parquet").iterdir())) == 1
    reader = CallLogReader(run.calls)
    reader.refresh()
    assert len(reader.sessions()) == 60


def test_damage_is_named_by_the_driver_and_by_check(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path)
    assert check_log.state(run) is None
    run.create()
    write(run.calls / "r0.jsonl", whole("a", "s"))
    assert check_log.state(run) == ("1 sessions", True)
    with (run.calls / "r0.jsonl").open("a") as file:
        file.write("rubbish\n")
    write(run.calls / "r1.jsonl", whole("b", "t"))
    with (run.calls / "r1.jsonl").open("a") as file:
        file.write('{"event"')
    found = check_log.state(run)
    assert found is not None
    state, ok = found
    assert not ok and "r0.jsonl:4: no event of a call log (quarantined: s)" in state and "r1.jsonl: 8 bytes" in state
    recordings = Recordings(run)
    for _ in range(2):
        (_, of_s), (_, of_t) = recordings.with_calls([make_record("s", 1.0), make_record("t", 1.0)])
    assert [call.trainable for call in (*of_s, *of_t)] == [False, True]
    assert caplog.text.count("r0.jsonl:4") == 1


async def test_an_event_that_came_after_the_refresh_is_no_torn_one(tmp_path: Path) -> None:
    """As when a replica ends just then: nobody writes the file any more, and not all of it has been read."""
    log = CallLogWriter(tmp_path / "r0.jsonl")
    await log.append(whole("a", "s")[0])
    reader = CallLogReader(tmp_path)
    reader.refresh()
    await log.append(closed("s"))
    log.close()
    assert reader.torn() == []
    with log.path.open("a") as file:
        file.write('{"eve')
    assert [tail.bytes for tail in reader.torn()] == [5]
