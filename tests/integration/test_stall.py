"""A run that waits for room says for what."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console

from forge_ray.job import stall
from forge_ray.report.progress import Progress


async def test_what_the_cluster_cannot_place_is_named_once(cluster: None, monkeypatch) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setattr(stall, "QUIET_S", 0.2)
    monkeypatch.setattr(stall, "PERIOD_S", 0.1)
    text = io.StringIO()
    with Progress(console=Console(file=text, width=300)) as progress:
        async with stall.watch(progress):
            for _ in range(100):
                if stall.waiting() is None:
                    break  # what came before has ended
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.5)
            progress.note("waits")
            wanted = placement_group([{"CPU": 1000}])
            try:
                for _ in range(300):
                    if "CPU: 1000" in text.getvalue():
                        break
                    await asyncio.sleep(0.2)
                await asyncio.sleep(0.5)
            finally:
                remove_placement_group(wanted)
    before, line = text.getvalue().split("waits\n")
    assert "Ray waits for room" not in before
    assert line.count("\n") == 1 and "Ray waits for room for a group of {CPU: 1000}; free: " in line and "of 8 CPU" in line
