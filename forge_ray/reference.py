"""The name of a function of the user's: `package.module:function` or `file.py:function`.

Relative to a folder, that of the config file or of the task: a `file.py` is looked for there, and so is a module before the Python path is
asked. What is found is named by its absolute path, so that a worker on another machine of a shared file system finds it too.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Collection
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
    """Why there is no such function, or module, without running it; None where there is one, or might be."""
    if reference.file is not None:
        return missing_function(reference.file, reference.function) if reference.file.is_file() else f"{reference.file} does not exist"
    assert reference.module is not None
    top = reference.module.partition(".")[0]
    try:
        return None if importlib.util.find_spec(top) is not None else f"no module {top!r} beside the config file or on the Python path"
    except (ImportError, ValueError) as error:
        return f"module {top!r} cannot be found ({error})"


def missing_function(file: Path, name: str) -> str | None:
    """Why `file` has no function `name`, told from its text without running it; None where it has, or might make it while it runs."""
    tree, problem = _parsed(file)
    if tree is None:
        return problem
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name):
            # Assigned, or a way to define anything.
            defined.add("*" if node.id in ("globals", "exec", "setattr", "vars") else node.id)
    if name in defined or "*" in defined:
        return None
    known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return f"{file} has no function {name!r}{_listed('it has', known)}"


def unknown_argument(file: Path, name: str, given: Collection[str], passed: Collection[str]) -> str | None:
    """Which of the keywords `given` the function `name` of `file` does not take, or which it needs beside them and those that are `passed`
    by us anyway; told from its text. None where all is well, or where only running it would tell (a decorator, `**options`)."""
    tree, _ = _parsed(file)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name] if tree is not None else []
    if len(found) != 1 or found[0].decorator_list:
        return None
    takes = found[0].args
    names = [argument.arg for argument in (*takes.args[1:], *takes.kwonlyargs)]  # the first is `out`
    own = [argument for argument in names if argument not in passed]
    if takes.kwarg is None and (unknown := next((key for key in given if key not in names), None)) is not None:
        return f"{name} of {file.name} takes no {unknown!r}{_listed('it takes', own) or ', nor any other option'}"
    optional = {argument.arg for argument in takes.args[len(takes.args) - len(takes.defaults) :]}
    optional |= {argument.arg for argument, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if default is not None}
    if (needed := next((key for key in own if key not in given and key not in optional), None)) is not None:
        return f"{name} of {file.name} needs {needed!r}"
    return None


def _listed(what: str, names: Collection[str]) -> str:
    return f"; {what} {', '.join(names)}" if names else ""


def _parsed(file: Path) -> tuple[ast.Module | None, str]:
    """The syntax tree of `file`; without one, why."""
    try:
        return ast.parse(file.read_bytes(), str(file)), ""
    except SyntaxError as error:
        return None, f"{file}:{error.lineno} is no Python ({error.msg})"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{file} cannot be read ({error})"
