"""Compaction of the call log beside a run: in a thread of its own, now and then, never in the way.

Cut short at any point it leaves the log whole (`call_log.compactor`), so it is a daemon thread that nobody waits for; what it fails at is
logged and tried again later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from pathlib import Path

from forge_ray.errors import ForgeRayError
from forge_ray.trajectories.call_log.segments import segments

log = logging.getLogger(__name__)

PAUSE_S = 30.0
"""Between the end of one compaction and the next."""


class Compaction:
    """Compacts the log in `directory`, whose segments have about `segment_bytes`."""

    def __init__(self, directory: Path, segment_bytes: int, *, grace_s: float = 60.0) -> None:
        self._directory, self._segment_bytes, self._grace_s = directory, segment_bytes, grace_s
        self._compactor = None
        self._thread: threading.Thread | None = None
        self._next = 0.0

    def kick(self, alive: Collection[str]) -> None:
        """Begin a compaction, unless one runs or ran a moment ago, or no segment is full. `alive`: ids of the replicas that live."""
        if (self._thread is not None and self._thread.is_alive()) or time.monotonic() < self._next:
            return
        if len(segments(self._directory)) <= len(alive):
            return  # each replica's newest and nothing else
        self._thread = threading.Thread(target=self._run, args=(frozenset(alive),), name="forge-ray compaction", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the compaction under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, alive: Collection[str]) -> None:
        from forge_ray.trajectories.call_log.compactor import Compactor

        if self._compactor is None:
            self._compactor = Compactor(self._directory, grace_s=self._grace_s, least_bytes=self._segment_bytes // 2)
        try:
            done = self._compactor.run(alive)
        except (OSError, ForgeRayError) as error:
            log.warning("the call log could not be compacted, which is tried again: %s", error)
        else:
            if done.part is not None:
                counts = f"{done.calls} calls of {done.sessions} sessions, {done.bytes_before} -> {done.bytes_after} bytes"
                log.info("call log: %s moved to %s", counts, done.part)
        finally:
            self._next = time.monotonic() + PAUSE_S
