"""What a reader of the call log found wrong in it. Nothing here stops a reader: it is reported, and what it touches is not trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """A complete line (or a whole file) that is not what the writer writes, or that contradicts another one."""

    file: Path
    line: int
    """Counted from 1; 0: the file as a whole."""
    what: str
    sessions: tuple[str, ...]
    """Sessions that are in quarantine for it: their calls are read as far as possible, and none of them is trainable."""

    def __str__(self) -> str:
        named = ", ".join(self.sessions[:3]) + (f" and {len(self.sessions) - 3} more" if len(self.sessions) > 3 else "")
        return f"{self.file}:{self.line}: {self.what}" + (f" (quarantined: {named})" if named else "")


@dataclass(frozen=True)
class TornTail:
    """Bytes without a newline at the end of a file that nobody writes any more: an event whose writer died under it. Nobody was told that
    this event is on disk, so nothing is lost."""

    file: Path
    bytes: int

    def __str__(self) -> str:
        return f"{self.file}: {self.bytes} bytes of an event that was never whole"
