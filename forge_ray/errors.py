"""Errors that a person can act on.

`UserError` is the one class for bad input: it names the file, the field and the fix in one line, and the command line turns
it into exit code 2. Everything else that is raised is a fault of ours or of the machine. Errors that belong to one room are
defined there and derive from `ForgeRayError`.
"""

from __future__ import annotations


class ForgeRayError(Exception):
    """Base of every error that ForgeRay raises on purpose."""


class UserError(ForgeRayError):
    """Bad input. `str(error)` is one line: where (file and field), what is wrong, how to mend it."""

    def __init__(self, problem: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.problem, self.where, self.fix = problem, where, fix
        line = f"{where}: {problem}" if where else problem
        super().__init__(" ".join((f"{line}; {fix}" if fix else line).split()))
