"""From the config's `policy.engine` and `policy.server` to a server command line, in vLLM's own spelling."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from forge_ray.errors import UserError


def command_line(
    known: Iterable[str],
    fixed: Mapping[str, Any],
    default: Mapping[str, Any],
    given: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Arguments for a parser with the destinations `known`.

    `fixed` may not be given, `default` may be overridden; `given` maps a config key (for messages) to its section. Raises `UserError`
    that names an unknown argument's nearest known name.
    """
    names = set(known)
    merged = dict(default)
    for section, values in given.items():
        for key, value in values.items():
            name = key.replace("-", "_").lstrip("_")
            if name in fixed:
                raise UserError(f"{section}.{key} is set by the proxy itself", where="config", fix="remove it")
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
                raise UserError(f"{section}.{key} is no argument of vLLM", where="config", fix=f"did you mean {near[0]}?")
            merged[name] = value
    line: list[str] = []
    for name, value in {**merged, **fixed}.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if value is True:
            line.append(flag)
        elif value is False:
            line.append("--no-" + name.replace("_", "-"))
        elif isinstance(value, Mapping):
            line += [flag, json.dumps(value)]
        elif isinstance(value, list | tuple):
            line += [flag, *(json.dumps(item) if isinstance(item, Mapping) else str(item) for item in value)]
        else:
            line.append(f"{flag}={value}")
    return line
