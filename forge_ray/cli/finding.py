"""What `forge-ray check` says of one thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    state: str
    """What was found, in a few words."""
    ok: bool = True
    blocking: bool = True
    """Whether a run cannot start without it."""
    fix: str = ""
