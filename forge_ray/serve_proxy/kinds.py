"""What kind of call a request is, as far as its headers and its shape tell.

Harnesses mark sub-agents and compactions in headers of their own, or not at all; what no header tells is found later by prefix
matching. A request for a model name other than the served one is a side call (titles, quota checks, topic detection).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forge_ray.serve_proxy.identity import Kind


def classify(headers: Mapping[str, str], body: Mapping[str, Any], *, side_model: bool) -> tuple[Kind, str | None]:
    """Kind of the call and the conversation id that the harness itself uses (None: it gave none).

    `headers` have lower-case names; `side_model`: the request names a model that is not the served one. A side call comes under the id of
    the conversation it is about and is no turn of it, so it has none.
    """
    conversation = _conversation(headers)
    if _codex_request_kind(headers) == "compaction" or headers.get("x-openai-subagent") == "compact":
        return "compaction", conversation
    if side_model:
        return "aux", None
    if any(headers.get(name) for name in ("x-openai-subagent", "x-claude-code-agent-id", "x-parent-session-id")):
        return "subagent", conversation
    if _drops_tools_in_side_calls(headers) and not body.get("tools"):
        # A summary request carries the history, a title request only the first user message.
        return ("compaction", conversation) if _has_assistant_turn(body) else ("aux", None)
    return "agent", conversation


def rank(kind: str | None) -> int:
    """Whose last call says how a rollout ended: the policy's outermost agent's; where it made none, another model's in its place."""
    return {"agent": 2, "upstream": 1}.get(kind or "", 0)


def _conversation(headers: Mapping[str, str]) -> str | None:
    """Codex: thread id; Claude Code: only sub-agents have an id of their own; OpenCode: session id."""
    if "x-codex-turn-metadata" in headers or headers.get("user-agent", "").startswith("codex"):
        return headers.get("thread-id")
    return headers.get("x-claude-code-agent-id") or headers.get("x-session-id")


def _codex_request_kind(headers: Mapping[str, str]) -> str | None:
    try:
        metadata = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except (ValueError, RecursionError):
        return None
    kind = metadata.get("request_kind") if isinstance(metadata, dict) else None
    return kind if isinstance(kind, str) else None


def _drops_tools_in_side_calls(headers: Mapping[str, str]) -> bool:
    """OpenCode and Qwen Code declare tools in every agent request, and none when they ask for a title or a summary."""
    agent = headers.get("user-agent", "").lower()
    return "opencode" in agent or agent.startswith("qwencode")


def _has_assistant_turn(body: Mapping[str, Any]) -> bool:
    items = body.get("messages") or body.get("input")
    return isinstance(items, list) and any(isinstance(item, dict) and item.get("role") == "assistant" for item in items)
