"""Tool arguments as values: whether two texts of JSON say the same, and if not, where.

Harnesses parse the arguments of a tool call and write them again: keys reordered, spaces and escapes changed, numbers in another form,
defaults of the tool's schema filled in. None of that changes what was said. Everything else does: `true` is no `1`, a key that is gone is
gone, and a key that came along must be declared with that very default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
"""A JSON schema; `{}` knows nothing."""


def load(text: str) -> tuple[bool, Any]:
    """`(True, value)` of a text of JSON, `(False, stripped text)` of any other. No text at all is an empty object."""
    stripped = text.strip()
    if not stripped:
        return True, {}
    try:
        return True, json.loads(stripped)
    except (ValueError, RecursionError):
        return False, stripped


def difference(before: str, after: str, schema: Schema | None = None) -> str | None:
    """None if `after` says what `before` says; else one phrase that names the place. `schema` is the arguments' JSON schema."""
    if before == after:
        return None
    (parsed, one), (also, other) = load(before), load(after)
    if not parsed or not also:
        return None if not parsed and not also and one == other else "they are no JSON on one side" if parsed != also else "their text"
    try:
        return _difference(one, other, schema or {}, "")
    except RecursionError:
        return "their text (they are nested too deeply to compare)"


def same(one: Any, other: Any) -> bool:
    """Whether two values of `json.loads` are equal as JSON: `True` is not `1`, `5000.0` is `5000`."""
    return _difference(one, other, {}, "") is None


def _difference(one: Any, other: Any, schema: Schema, at: str) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        return _objects(one, other, schema, at)
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"the length of {_name(at)}"
        items = _part(schema, "items")
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            if found := _difference(a, b, items, f"{at}[{index}]"):
                return found
        return None
    numbers = _number(one) and _number(other)
    if (numbers or type(one) is type(other)) and one == other:
        return None
    return f"the value of {_name(at)}"


def _objects(one: dict[str, Any], other: dict[str, Any], schema: Schema, at: str) -> str | None:
    known = _part(schema, "properties")
    for key, value in one.items():
        path = f"{at}.{key}" if at else key
        if key not in other:
            return f"{_name(path)} is gone"
        if found := _difference(value, other[key], _part(known, key), path):
            return found
    for key, value in other.items():
        if key not in one:
            declared = _part(known, key)
            if "default" not in declared or not same(declared["default"], value):
                return f"{_name(f'{at}.{key}' if at else key)} was added"
    return None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _part(schema: Schema, name: str) -> Schema:
    found = schema.get(name)
    return found if isinstance(found, Mapping) else {}


def _name(path: str) -> str:
    return f"`{path}`" if path else "the whole"
