"""A YAML file as a person may have written it: read strictly, with the line of every key kept for messages.

What YAML would take in silence is refused with its line: a key that stands twice (the last would win). So is what only fails later: a
value that contains itself, and text that no file name, environment variable or JSON file can hold.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from forge_ray.errors import UserError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the strictness that it lacks."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text)
        self._path = path

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # 2020-13-45 is read as a date
            raise UserError(f"{node.value} is no value ({error})", where=self._where(node), fix="quote it if it is text") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: dict[str, yaml.Node] = {}
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode) and (first := names.setdefault(name.value, name)) is not name:
                raise UserError(
                    f"{name.value} stands twice, first in line {first.start_mark.line + 1}", where=self._where(name), fix="keep one of them"
                )
        return super().construct_mapping(node, deep)

    def _where(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"


def read(path: str | os.PathLike[str]) -> tuple[yaml.Node | None, dict[str, Any]]:
    """The nodes (for `line`) and the content of the mapping in the file at `path`. Raises `UserError`."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix="give the path of a run.yaml") from None
    except IsADirectoryError:
        raise UserError("is a directory", where=str(path), fix="give the path of a run.yaml") from None
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path), fix="give a file that you may read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 ({error.reason} at byte {error.start})", where=str(path), fix="save it as UTF-8") from None
    except ValueError as error:
        raise UserError(f"is no file name ({error})", where=repr(str(path))) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        loader = _Loader(text, str(path))
        tree = loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"not valid YAML ({getattr(error, 'problem', error)})", where=where, fix="check the indentation") from None
    except RecursionError:
        raise UserError("is nested too deeply", where=str(path), fix="write it flatter") from None
    if not isinstance(tree, dict):
        raise UserError("is not a mapping of keys", where=str(path), fix="see examples/quickstart/run.yaml")
    if (found := unusable(tree)) is not None:
        key, problem = found
        place = line(node, key)
        raise UserError(f"{dotted(key)} {problem}", where=f"{path}:{place}" if place else str(path), fix="correct the value")
    return node, tree


def value(text: str) -> Any:
    """What `text` means as a YAML value; where it means nothing, the text itself."""
    try:
        return yaml.safe_load(text) if text else None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return text


def line(node: Any, location: tuple[Any, ...]) -> int | None:
    """Line (from 1) of the deepest part of `location` that the YAML text has."""
    found = None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            for name, child in node.value:
                if name.value == str(part):
                    found, node = name.start_mark.line + 1, child
                    break
            else:
                return found
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            found = node.start_mark.line + 1
        else:
            return found
    return found


def dotted(location: tuple[Any, ...]) -> str:
    """A key as overrides write it."""
    return ".".join(str(part) for part in location)


def unusable(content: Any) -> tuple[tuple[Any, ...], str] | None:
    """The first place in `content` with what no config can hold, and what that is; None if there is none."""
    return _unusable(content, (), ())


def _unusable(content: Any, at: tuple[Any, ...], above: tuple[int, ...]) -> tuple[tuple[Any, ...], str] | None:
    if isinstance(content, str):
        return (
            None if _writable(content) else (at, "holds a character that no file name or JSON file can hold (NUL, half a surrogate pair)")
        )
    if not isinstance(content, dict | list):
        return None
    if id(content) in above or len(above) > 100:
        return at, "contains itself" if id(content) in above else "is nested too deeply"
    inside = (*above, id(content))
    for name, item in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(name, str) and not _writable(name):
            return at, "has a key that no JSON file can hold (NUL, half a surrogate pair)"
        if (found := _unusable(item, (*at, name), inside)) is not None:
            return found
    return None


def _writable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)
