"""JSON as models write it: the same value in spellings that programs do not give back unchanged."""

from __future__ import annotations

import json
from typing import Any, Literal

Spelling = Literal["compact", "python", "reversed", "escaped", "spaced"]


def spell(value: dict[str, Any], spelling: Spelling) -> str:
    r"""`value` as JSON text.

    compact: no blanks, raw unicode. python: `json.dumps`'s blanks, raw unicode. reversed: the keys in reverse order. escaped: everything
    beyond ASCII as `\uXXXX` (pairs of them beyond the basic plane) and `/` as `\/`. spaced: blanks around every colon and comma, and inside
    the braces.
    """
    if spelling == "reversed":
        return json.dumps(dict(reversed(value.items())), ensure_ascii=False)
    if spelling == "compact":
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if spelling == "escaped":
        return json.dumps(value, ensure_ascii=True).replace("/", "\\/")
    text = json.dumps(value, ensure_ascii=False, separators=(" ,  ", "  : ") if spelling == "spaced" else (", ", ": "))
    return "{  " + text[1:-1] + " }" if spelling == "spaced" else text
