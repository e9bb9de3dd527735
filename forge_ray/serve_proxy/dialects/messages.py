"""Anthropic messages."""

from __future__ import annotations

from forge_ray.serve_proxy.dialects.base import (
    VLLM_FIELDS,
    Check,
    Dialect,
    Json,
    Overflow,
    Refusal,
    Reply,
    first_refused,
    is_set,
    parse_object,
    without_nonce,
)

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
_REPLIES = {"end_turn": "answer", "stop_sequence": "answer", "tool_use": "tool_calls", "max_tokens": "length"}
_FIELDS: dict[str, tuple[Check, str]] = {**VLLM_FIELDS, "mcp_servers": (is_set, "this server runs no tools")}
_DECODED = (b'"type":"message_start"', b'"type":"message_delta"')


class MessagesReply(Reply):
    def event(self, data: bytes) -> None:
        if b'"type":"message_stop"' in data:
            self.complete = self._stopped
        elif any(mark in data for mark in _DECODED):
            event = parse_object(data) or {}
            if event.get("type") == "message_start":
                self.usage = (event.get("message") or {}).get("usage")
            elif event.get("type") == "message_delta":
                self.usage = {**(self.usage or {}), **(event.get("usage") or {})}
                self._stop((event.get("delta") or {}).get("stop_reason"))

    def body(self, body: Json) -> None:
        self.usage = body.get("usage")
        self._stop(body.get("stop_reason"))

    _stopped = False

    def _stop(self, reason: str | None) -> None:
        self._stopped = reason is not None
        self.reply = _REPLIES.get(reason or "")  # type: ignore[assignment]


class Messages(Dialect):
    """`POST /v1/messages`; `count_tokens` beside it samples nothing."""

    name, path = "messages", "/v1/messages"
    uncounted = ("/v1/messages/count_tokens",)
    caps = ("max_tokens",)
    reply = MessagesReply

    def error(self, refusal: Refusal, request_id: str) -> Json:
        kind = _ERROR_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": request_id}

    def overflow(self, overflow: Overflow) -> Refusal:
        got = f"{overflow.prompt} tokens > {overflow.window} maximum" if overflow.prompt else f"more than {overflow.window} tokens"
        return Refusal(400, f"prompt is too long: {got}")

    def refuse(self, body: Json) -> Refusal | None:
        return first_refused(body, _FIELDS)

    def adapt(self, body: Json) -> bool:
        changed = False
        # A budget would force the end of the reasoning on the model, and one above the clamped cap is refused.
        thinking = body.get("thinking")
        if isinstance(thinking, dict) and thinking.get("type") == "enabled":
            body["thinking"], changed = {"type": "adaptive"}, True
        if (text := without_nonce(body.get("system"))) is not None:
            body["system"], changed = text, True
        return changed
