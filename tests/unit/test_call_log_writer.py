"""The call log's writer: what returned is on disk, one sync serves many, and an error reaches every waiter."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from forge_ray.trajectories.call_log import CallLogError, CallLogWriter
from tests.unit.log_events import ended, opened, read


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
