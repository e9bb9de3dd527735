"""Occupancy: the share of the slots' time in which nothing ran, between two readings."""

from __future__ import annotations


class Occupancy:
    """`slots` places, of which some are taken; all times from one monotonic clock, in seconds."""

    def __init__(self, slots: int, now: float) -> None:
        self._slots, self._taken = slots, 0
        self._since = self._changed = now
        self._used = 0.0

    def set(self, taken: int, now: float) -> None:
        """From now on `taken` places are taken."""
        self._used += self._taken * (now - self._changed)
        self._taken, self._changed = taken, now

    def idle_share(self, now: float) -> float:
        """Of the time since the reading before, in 0..1; begins a new reading."""
        self.set(self._taken, now)
        whole = self._slots * (now - self._since)
        idle = max(0.0, 1 - self._used / whole) if whole else 0.0
        self._since, self._used = now, 0.0
        return idle
