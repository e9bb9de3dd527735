"""The Parquet parts of a call log directory, as a reader sees them: which sessions each holds, and the events of one of them.

A part is never changed once it has its name, so its footer is read once. pyarrow is imported when there is a part.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from forge_ray.trajectories.call_log.events import SessionEvents
from forge_ray.trajectories.call_log.problems import Problem, TornTail

FOLDER = "parquet"


@dataclass(frozen=True)
class Part:
    """One file and what its metadata says."""

    path: Path
    groups: dict[str, int]
    """Row group by session."""
    closed: frozenset[str]
    """Those of its sessions that had been closed."""
    taken: dict[str, int]
    """Segment name -> bytes: every event that its sessions have in that segment before that offset is in the part."""
    torn: tuple[TornTail, ...]
    """Torn tails of the segments that were deleted after it was written."""


@dataclass
class Parts:
    """Every part below `directory`/parquet."""

    directory: Path
    known: dict[str, Part] = field(default_factory=dict)
    """By file name."""
    problems: list[Problem] = field(default_factory=list)
    _of: dict[str, list[Part]] = field(default_factory=dict)
    _bad: set[str] = field(default_factory=set)

    def refresh(self) -> None:
        """Read the footers of new parts. One that cannot be read is a `Problem`."""
        try:
            names = sorted(os.listdir(self.directory / FOLDER))
        except FileNotFoundError:
            return
        for name in names:
            if name in self.known or name in self._bad or name.startswith(".") or not name.endswith(".parquet"):
                continue
            from forge_ray.trajectories.call_log import table

            path = self.directory / FOLDER / name
            try:
                part = table.read_part(path)
            except table.NoPart as error:
                self._bad.add(name)
                self.problems.append(Problem(path, 0, str(error), ()))
                continue
            self.known[name] = part
            for session in part.groups:
                self._of.setdefault(session, []).append(part)

    def sessions(self) -> list[str]:
        return list(self._of)

    def __contains__(self, session: str) -> bool:
        return session in self._of

    def closed(self, session: str) -> bool:
        return any(session in part.closed for part in self._of.get(session, ()))

    def number(self, session: str) -> int:
        """Parts that hold events of `session`."""
        return len(self._of.get(session, ()))

    def take(self, into: SessionEvents) -> tuple[int, list[str]]:
        """Take in every event of the session that is in a part; returns how many rows those were and the ids of its calls there. Raises
        `ValueError` where a part cannot be read."""
        rows, calls = 0, []
        for part in self._of.get(into.session, ()):
            from forge_ray.trajectories.call_log import table

            for row in table.read_session(part, into.session):
                rows += 1
                if row["row"] == "call":
                    calls.append(row["call"])
                for event in table.events(row):
                    into.take(event, row["replica"], part.path, 0)
        return rows, calls
