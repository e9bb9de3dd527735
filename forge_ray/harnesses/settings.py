"""Settings files of programs: trees of dicts, merged with a user's own keys and written as TOML (JSON needs nothing of ours)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `extra` laid over it, mapping by mapping; neither is changed."""
    merged = dict(base)
    for key, value in extra.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def toml(tree: Mapping[str, Any], table: str = "") -> str:
    """A tree of mappings, lists and scalars as TOML, one table per mapping. None is left out: TOML has none."""
    scalars = {key: value for key, value in tree.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"[{table}]"] if table and (scalars or not tree) else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in scalars.items()]
    text = "\n".join(lines) + "\n\n" if lines else ""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            text += toml(value, f"{table}.{_key(key)}" if table else _key(key))
    return text


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
    # JSON's scalars are TOML's, but for characters outside the basic plane (JSON escapes them as two halves) and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
