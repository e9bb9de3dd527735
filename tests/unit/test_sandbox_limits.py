"""Limits of a sandbox's commands act, and are told by their signs."""

from __future__ import annotations

import os

import pytest

from forge_ray.sandboxes import bubblewrap, limits, process
from tests.sandbox_maker import LONG, Maker, alive, python, token


async def test_memory_limit_of_a_task_acts_and_is_named(maker: Maker) -> None:
    maker.task(toml='[environment]\nmemory = "1G"\nstorage = "2G"', test="#!/bin/sh\nexit 0\n")
    async with await maker.sandbox() as box:
        small = await box.run(python("x = bytearray(400 << 20); print(len(x))"), deadline_s=LONG)
        assert small.exit_code == 0
        large = await box.run(python("x = bytearray(1536 << 20); print(len(x))"), deadline_s=LONG)
        assert (large.limit, large.exit_code) == ("memory", 1)
        assert "out of memory" in large.detail and "1024 MB" in large.detail


async def test_limits_of_cpu_files_and_descriptors(maker: Maker) -> None:
    async with await maker.sandbox(cpu_seconds=1, open_files=40, file_mb=1) as box:
        assert (await box.run(["sh", "-c", "while :; do :; done"], deadline_s=LONG)).limit == "cpu"
        big = await box.run(["sh", "-c", "exec head -c 3000000 /dev/zero > big"], deadline_s=LONG)
        assert big.limit == "file" and os.stat(box.directory / "workspace" / "big").st_size == 1 << 20
        opening = "fs = []\ntry:\n  while True: fs.append(open('/dev/null'))\nexcept OSError as e: print(e.errno, len(fs) < 40)"
        await box.run(python(opening), deadline_s=LONG)
        assert box.log_text() == "24 True\n"
        await box.run(["sh", "-c", "ulimit -c"], deadline_s=LONG)
        assert box.log_text() == "0\n"


async def test_limit_of_processes(maker: Maker) -> None:
    mark = token()
    async with await maker.sandbox(processes=20) as box:
        fine = await box.run(["sh", "-c", "for i in 1 2 3 4 5; do sleep 0.1 & done; wait; echo fine"], deadline_s=LONG)
        assert fine.exit_code == 0 and box.log_text() == "fine\n"
        script = f"for i in $(seq 60); do sh -c 'sleep 300; : {mark}' & done; wait"
        result = await box.run(["sh", "-c", script], deadline_s=LONG)
        assert result.limit == "processes" or (bubblewrap.counts_processes() and "fork" in box.log_text())
        assert not alive(mark)


async def test_a_log_flood_is_bounded_and_ends_at_the_deadline(maker: Maker) -> None:
    async with await maker.sandbox(log_bytes=50_000) as box:
        for deadline in (2, 8, 32):
            result = await box.run(["sh", "-c", "echo first; exec yes"], deadline_s=deadline)
            assert result.timed_out and result.log.stat().st_size < 50_100
            if result.log_bytes > 1_000_000:
                break
        assert result.log_bytes > 1_000_000
        assert box.log_text().startswith("first\ny\n")


@pytest.mark.parametrize(("kills", "limit", "words"), [((3, 3), None, "killed by SIGKILL"), ((3, 4), "memory", "out of memory")])
async def test_a_sigkill_is_out_of_memory_only_where_the_kernel_says_so(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, int], limit: str | None, words: str
) -> None:
    counted = iter(kills)
    monkeypatch.setattr(process, "oom_kills", lambda: next(counted))
    async with await maker.sandbox() as box:
        # The shell of a sandbox cannot kill itself, being the init of its process table: a child of it can.
        result = await box.run(["sh", "-c", "sh -c 'kill -KILL $$'; exit $?"], deadline_s=LONG)
        assert (result.exit_code, result.limit) == (137, limit) and words in result.detail


def test_the_out_of_memory_killers_count_can_be_read() -> None:
    assert limits.oom_kills() >= 0
    bound = limits.Limits(cpu_seconds=1)
    assert bound.recognise(137, b"", cpu_seconds=7) == "cpu" and bound.recognise(137, b"", cpu_seconds=3) is None
    assert limits.Limits(memory_mb=5).recognise(137, b"MemoryError") == "memory"
