"""Anthropic messages."""

from __future__ import annotations

import json

from forge_ray.serve_proxy.dialects.base import Dialect, Overflow, Reply, ReplyClass, parse_object, without_nonce
from forge_ray.serve_proxy.dialects.fields import (
    ENGINE_FIELDS,
    FORCED,
    RENDERING,
    TEMPLATE_VARIABLES,
    Fields,
    Json,
    is_set,
    objects,
    unsupported,
)
from forge_ray.serve_proxy.dialects.refusal import Refusal

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_REPLIES: dict[str, ReplyClass] = {"end_turn": "answer", "stop_sequence": "answer", "tool_use": "tool_calls", "max_tokens": "length"}
_NO_TOOLS = "this server runs no tools"
_FIELDS = Fields(
    honoured={name: RENDERING[name] for name in ("stream", "cache_salt")}
    | {
        "chat_template_kwargs": TEMPLATE_VARIABLES,
        "model": "any name is served; another than `policy.served_name` makes the call `aux`",
        "messages": "also `system` messages in their midst",
        "system": "",
        "max_tokens": "an upper bound: cut to what the window leaves",
        "stop_sequences": RENDERING["stop"],
        "tools": "with an `input_schema`; see below for others",
        "tool_choice": "`any` and `tool` are sampled under a grammar; `disable_parallel_tool_use`: the reply shows the first call only",
        "thinking": "`disabled` asks the chat template for no reasoning; the other types leave it to the model",
        "output_config": "`effort` is a variable of the chat template; `format` flags the call as sampled under a grammar",
    },
    ignored={
        "metadata": "a note of the client's",
        "context_management": "the history is served as it comes",
        "service_tier": "there is one tier",
        "inference_geo": "there is one place",
        "speed": "there is one speed",
        "betas": "this server has no versions",
        "cache_control": "the prefix cache finds prefixes itself; inside blocks it is ignored too, but not named",
        "thinking.budget_tokens": "keeping to it would force tokens that the model did not choose",
        "thinking.display": "reasoning is always shown",
        "output_config.task_budget": "the model is not told of any",
        "mm_payload": "of another route",
        "return_mm_kwargs": "of another route",
        "tools: web_search_…": _NO_TOOLS + "; the model is not told of it",
        "tools: web_fetch_…": _NO_TOOLS + "; the model is not told of it",
        "tools: code_execution_…": _NO_TOOLS + "; the model is not told of it",
        "tools: tool_search_tool_…": "deferred tools are the client's to add; the model is not told of it",
        "tools: advisor_…": _NO_TOOLS + "; the model is not told of it",
        "tools: mcp_toolset": _NO_TOOLS + "; the model is not told of it",
    },
    sampling=dict.fromkeys(("temperature", "top_p", "top_k"), FORCED),
    refused=ENGINE_FIELDS
    | {
        "mcp_servers": (is_set, _NO_TOOLS),
        "container": (is_set, _NO_TOOLS),
        "fallbacks": (is_set, "one policy answers"),
    },
)
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
"""Types of tools that Anthropic's servers would run."""
_DECODED = (b'"type":"message_start"', b'"type":"message_delta"', b'"type":"tool_use"')


class MessagesReply(Reply):
    def event(self, data: bytes) -> None:
        if b'"type":"message_stop"' in data:
            self.complete = self._stopped
        elif any(mark in data for mark in _DECODED):
            event = parse_object(data) or {}
            if event.get("type") == "content_block_start":
                self.note((event.get("content_block") or {}).get("id"))
            elif event.get("type") == "message_start":
                self.usage = (event.get("message") or {}).get("usage")
            elif event.get("type") == "message_delta":
                self.usage = {**(self.usage or {}), **(event.get("usage") or {})}
                self._stop((event.get("delta") or {}).get("stop_reason"))

    def body(self, body: Json) -> None:
        self.usage = body.get("usage")
        self.note(*(block.get("id") for block in body.get("content") or ()))
        self._stop(body.get("stop_reason"))

    _stopped = False

    def _stop(self, reason: str | None) -> None:
        self._stopped = reason is not None
        self.reply = _REPLIES.get(reason or "")


class Messages(Dialect):
    """`POST /v1/messages`; `count_tokens` beside it samples nothing."""

    name, path = "messages", "/v1/messages"
    uncounted = ("/v1/messages/count_tokens",)
    caps = ("max_tokens",)
    reply = MessagesReply
    fields = _FIELDS
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def error(self, refusal: Refusal, request_id: str) -> Json:
        kind = _ERROR_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": request_id}

    def overflow(self, overflow: Overflow) -> Refusal:
        got = f"{overflow.prompt} tokens > {overflow.window} maximum" if overflow.prompt else f"more than {overflow.window} tokens"
        return Refusal(400, f"prompt is too long: {got}")

    def stream_error(self, refusal: Refusal, request_id: str) -> bytes:
        return f"event: error\ndata: {json.dumps(self.error(refusal, request_id))}\n\n".encode()

    def refuse(self, body: Json) -> Refusal | None:
        refusal = self.fields.refuse(body)
        if refusal is not None:
            return refusal
        tools = objects(body.get("tools"))
        for number, tool in enumerate(tools):
            kind = tool.get("type")
            if isinstance(kind, str) and not _hosted(tool) and kind != "custom" and "input_schema" not in tool:
                return unsupported(f"tools[{number}]", f"a tool of type {kind!r} brings no schema that the model could be told")
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("name") in [tool.get("name") for tool in tools if _hosted(tool)]:
            return unsupported("tool_choice", f"{_NO_TOOLS}, so {choice['name']!r} cannot be called")
        return None

    def unheeded(self, body: Json, *, forced: bool) -> list[str]:
        return super().unheeded(body, forced=forced) + [f"tools: {tool['type']}" for tool in objects(body.get("tools")) if _hosted(tool)]

    def adapt(self, body: Json) -> bool:
        changed = self.fields.remove(body)
        # A budget would force the end of the reasoning on the model, and one above the clamped cap is refused.
        thinking = body.get("thinking")
        if isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive") and thinking != {"type": "adaptive"}:
            body["thinking"], changed = {"type": "adaptive"}, True
        if (text := without_nonce(body.get("system"))) is not None:
            body["system"], changed = text, True
        return _without_hosted_tools(body) or changed


def _hosted(tool: Json) -> bool:
    return str(tool.get("type", "")).startswith(_HOSTED)


def _without_hosted_tools(body: Json) -> bool:
    """Leave only tools that the client runs; no tools and an empty list of tools are the same request."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return False
    kept = [tool for tool in tools if not (isinstance(tool, dict) and _hosted(tool))]
    if kept and len(kept) == len(tools):
        return False
    body["tools"] = kept
    if not kept:
        del body["tools"]
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") in ("auto", "none"):
            del body["tool_choice"]
    return True
