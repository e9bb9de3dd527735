"""Errors that a person can act on.

`UserError` is the one class for bad input: it names the file, the field and the fix in one line, and the command line turns
it into exit code 2. Everything else that is raised is a fault of ours or of the machine. Errors that belong to one room are
defined there and derive from `ForgeRayError`.
"""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")


def one_line(text: str) -> str:
    """`text` on one line, as any file can hold it: half a surrogate pair, which stands for a byte of a file name that is no UTF-8, becomes
    U+FFFD."""
    return _SURROGATE.sub("\ufffd", " ".join(text.split()))


class ForgeRayError(Exception):
    """Base of every error that ForgeRay raises on purpose."""


class UserError(ForgeRayError):
    """Bad input. `str(error)` is one line: where (file and field), what is wrong, how to mend it."""

    def __init__(self, problem: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.problem, self.where, self.fix = problem, where, fix
        line = f"{where}: {problem}" if where else problem
        super().__init__(one_line(f"{line}; {fix}" if fix else line))
