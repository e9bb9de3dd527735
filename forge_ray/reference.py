"""The name of a function of the user's: `package.module:function` or `file.py:function`.

Relative to a folder, that of the config file or of the task: a `file.py` is looked for there, and so is a module before the Python path is
asked. What is found is named by its absolute path, so that a worker on another machine of a shared file system finds it too.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from forge_ray.errors import UserError

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FUNCTION = re.compile(r"[A-Za-z_]\w*")
FIX = "write package.module:function or file.py:function"


@dataclass(frozen=True)
class Reference:
    """A function, by the file it is in or the module's name."""

    file: Path | None
    """Absolute; None: `module` on the Python path."""
    module: str | None
    function: str

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.function}"


def parse(text: str, base: Path, where: str) -> Reference:
    """The reference that `text` means in the folder `base`; nothing is imported. Raises `UserError` for what can be none."""
    left, separator, function = text.rpartition(":")
    if not separator or not _FUNCTION.fullmatch(function):
        raise UserError(f"{text!r} names no function", where=where, fix=FIX)
    if left.endswith(".py"):
        return Reference(Path(os.path.normpath(base / os.path.expanduser(left))), None, function)
    if not _MODULE.fullmatch(left):
        raise UserError(f"{left!r} is no module", where=where, fix=FIX)
    beside = base.joinpath(*left.split("."))
    for file in (beside.with_name(f"{beside.name}.py"), beside / "__init__.py"):
        if file.is_file():
            return Reference(file.resolve(), None, function)
    return Reference(None, left, function)


def missing(reference: Reference) -> str | None:
    """Why there is no such file or module, without running it; None where there is one."""
    if reference.file is not None:
        return None if reference.file.is_file() else f"{reference.file} does not exist"
    assert reference.module is not None
    top = reference.module.partition(".")[0]
    try:
        return None if importlib.util.find_spec(top) is not None else f"no module {top!r} beside the config file or on the Python path"
    except (ImportError, ValueError) as error:
        return f"module {top!r} cannot be found ({error})"
