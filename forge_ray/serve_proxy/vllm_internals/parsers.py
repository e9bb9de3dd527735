"""The names of vLLM's parsers: vLLM itself looks them up only when the engine is up, and then fails with a TypeError or a KeyError."""

from __future__ import annotations

import difflib
from argparse import Namespace

from forge_ray.errors import UserError


def check_parsers(args: Namespace) -> None:
    """Raise `UserError` for a parser that is not there. One that a plugin brings is known only when it is loaded."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for key, manager in (("tool_call_parser", ToolParserManager), ("reasoning_parser", ReasoningParserManager)):
        name, known = getattr(args, key, None), manager.list_registered()
        if not name or name in known or getattr(args, f"{key.replace('_call', '')}_plugin", None):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(known))}"
        raise UserError(f"vLLM has no {key} {name!r}", where=f"policy.server.{key}", fix=fix)
