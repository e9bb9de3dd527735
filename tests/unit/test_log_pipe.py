"""A flood is slowed down by what it has written, not by what a pipe holds."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from forge_ray.sandboxes import log_pipe
from forge_ray.sandboxes.log_pipe import LogPipe

MEGABYTE = 1 << 20


@pytest.mark.parametrize("sizes", [log_pipe._PIPE_SIZES, (), (1 << 40,)])
async def test_a_flood_rests_once_per_megabyte_whatever_the_pipe_holds(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = 0
    resume = LogPipe._resume

    def counted(pipe: LogPipe) -> None:
        nonlocal rests
        rests += 1
        resume(pipe)

    monkeypatch.setattr(LogPipe, "_resume", counted)
    monkeypatch.setattr(log_pipe, "_PIPE_SIZES", sizes)
    pipe = LogPipe(tmp_path / "x.log", 1000)
    command = subprocess.Popen(["head", "-c", str(8 * MEGABYTE), "/dev/zero"], stdout=pipe.write_end)
    pipe.started()
    while command.poll() is None:
        await asyncio.sleep(0.01)
    pipe.close()
    assert pipe.total == 8 * MEGABYTE and 1 <= rests <= 8
    assert pipe.path.stat().st_size < 1100
