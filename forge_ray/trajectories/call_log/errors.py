"""How the call log can fail."""

from __future__ import annotations

from pathlib import Path

from forge_ray.errors import ForgeRayError


class CallLogError(ForgeRayError):
    """The log cannot be written or read: a full disk, an I/O error, an event that is no JSON. What was to be logged is not."""


class CallLogCorrupt(ForgeRayError):
    """A complete line of the log is not what the writer writes."""

    def __init__(self, file: Path, line: int, problem: str) -> None:
        self.file, self.line, self.problem = file, line, problem
        super().__init__(f"{file}:{line}: {problem}")
