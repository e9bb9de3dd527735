"""The Exchange: the one actor between the driver and the train workers.

Downwards go step batches, upwards go events (weights, metrics, progress). Invariants:

- The batch of step k is put once and never changed; it can be fetched again until a checkpoint of a later step exists, so a train worker
  group that restarts trains the same batch. (The same table lies in `batches/step-….parquet` before it is put here.)
- Every start of a worker group takes a fresh incarnation, so that version labels of a lost group never come back with other weights.
- Events are numbered from 0 and kept; a reader asks for those from a number on and so never misses or repeats one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from forge_ray.run_dir import RunDir, next_incarnation

CLOSED = "closed"


class Exchange:
    """Async actor; `max_concurrency` must exceed the number of train workers plus the driver's polls."""

    def __init__(self, root: str) -> None:
        self._run = RunDir(Path(root))
        self._steps: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self._closed = False

    async def begin(self) -> int:
        """A fresh incarnation for a starting worker group (called by rank 0 only)."""
        return next_incarnation(self._run)

    async def put_step(self, step: int, refs: list[Any], stats: dict[str, Any]) -> None:
        """Offer the batch of `step`: one ObjectRef of an Arrow table per rank, in a list so that Ray does not resolve it. A second
        offer is ignored."""
        async with self._changed:
            self._steps.setdefault(step, {"refs": refs, "stats": stats})
            self._changed.notify_all()

    async def get_step(self, step: int, rank: int) -> dict[str, Any] | str:
        """Wait for the batch of `step`: `{"ref": [ref of this rank], "stats": …}`, or `CLOSED` when no further step will come."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or step in self._steps)
            if step not in self._steps:
                return CLOSED
            entry = self._steps[step]
            return {"ref": [entry["refs"][rank]], "stats": entry["stats"]}

    async def forget_before(self, step: int) -> None:
        """A checkpoint of `step` is on disk: earlier batches will not be asked for again."""
        for old in [k for k in self._steps if k < step]:
            del self._steps[old]

    async def post(self, event: dict[str, Any]) -> None:
        """A worker's event: {"kind": "weights" | "metrics" | "progress" | "checkpoint", …}."""
        async with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    async def events(self, start: int, timeout: float = 5.0) -> list[dict[str, Any]]:
        """Events from number `start` on; waits up to `timeout` seconds for the first."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: len(self._events) > start), timeout)
            except TimeoutError:
                return []
            return self._events[start:]

    async def close(self) -> None:
        """No further step will come: workers that wait return."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
