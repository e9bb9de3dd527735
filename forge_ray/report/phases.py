"""Where a run's time went: `phases.jsonl`, one line per phase that ended.

Phases may overlap (the engine starts while SFT runs), and a resumed run adds its own lines, so the seconds of a phase are summed over the
lines and the total is the time that at least one phase was running. Time between two starts of the driver is nobody's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Phase:
    """One stretch of a phase; `started` in Unix seconds."""

    name: str
    started: float
    seconds: float


class PhaseLog:
    """Times phases and appends them to `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body, also one that raises; may be nested and used from several tasks at once."""
        started, clock = time.time(), time.monotonic()
        try:
            yield
        finally:
            self.add(Phase(name, started, time.monotonic() - clock))

    def add(self, phase: Phase) -> None:
        """Append one finished phase."""
        line = json.dumps({"phase": phase.name, "started": round(phase.started, 3), "seconds": round(phase.seconds, 3)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def read_phases(path: Path) -> list[Phase]:
    """The phases in `path` by their start; lines that a crash cut off are left out."""
    phases = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
            phases.append(Phase(str(entry["phase"]), float(entry["started"]), max(0.0, float(entry["seconds"]))))
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(phases, key=lambda phase: phase.started)


def seconds_by_phase(phases: list[Phase]) -> dict[str, float]:
    """Seconds of every phase in the order of their first start, then `total`: the length of their union."""
    seconds: dict[str, float] = {}
    total, reached = 0.0, float("-inf")
    for phase in sorted(phases, key=lambda phase: phase.started):
        seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
        end = phase.started + phase.seconds
        total += max(0.0, end - max(reached, phase.started))
        reached = max(reached, end)
    return {name: round(value, 3) for name, value in {**seconds, "total": total}.items()}
