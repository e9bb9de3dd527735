"""Anthropic messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from forge_ray.conformance.dialects.base import Json, Usage, Wire, fresh, slices, sse, text_of
from forge_ray.conformance.reply import Reply


class Messages(Wire):
    name, routes = "messages", ("/v1/messages",)

    def messages(self, body: Json) -> Iterable[tuple[bool, str]]:
        yield False, text_of(body.get("system"))
        for message in body.get("messages") or ():
            text = text_of(message.get("content"))
            for block in message["content"] if isinstance(message.get("content"), list) else ():
                if block.get("type") == "tool_use":
                    text += json.dumps(block, ensure_ascii=False)
                elif block.get("type") == "thinking":
                    text += block.get("thinking", "")
            yield message.get("role") == "assistant", text

    def unary(self, reply: Reply, usage: Usage, body: Json) -> Json:
        blocks: list[Json] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": fresh("sig")})
        if reply.text:
            blocks.append({"type": "text", "text": reply.text})
        blocks += [{"type": "tool_use", "id": fresh("toolu_"), "name": c.name, "input": json.loads(c.arguments)} for c in reply.calls]
        numbers = {"input_tokens": usage.prompt, "output_tokens": usage.reply}
        return {**_head(body), "content": blocks, "stop_reason": _stop(reply), "usage": numbers}

    def events(self, reply: Reply, usage: Usage, body: Json) -> Iterator[bytes]:
        def event(kind: str, **fields: object) -> bytes:
            return sse({"type": kind, **fields}, kind)

        yield event("message_start", message={**_head(body), "usage": {"input_tokens": usage.prompt, "output_tokens": 0}})
        parts: list[tuple[Json, str, str, str]] = []  # block at its start, kind of delta, field of it, text
        if reply.reasoning:
            parts.append(({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking", reply.reasoning))
        if reply.text:
            parts.append(({"type": "text", "text": ""}, "text_delta", "text", reply.text))
        for call in reply.calls:
            start = {"type": "tool_use", "id": fresh("toolu_"), "name": call.name, "input": {}}
            parts.append((start, "input_json_delta", "partial_json", call.arguments))
        for index, (start, kind, field, text) in enumerate(parts):
            yield event("content_block_start", index=index, content_block=start)
            for piece in slices(text):
                yield event("content_block_delta", index=index, delta={"type": kind, field: piece})
            if kind == "thinking_delta":
                yield event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": fresh("sig")})
            yield event("content_block_stop", index=index)
        end = {"stop_reason": _stop(reply), "stop_sequence": None}
        yield event("message_delta", delta=end, usage={"input_tokens": usage.prompt, "output_tokens": usage.reply})
        yield event("message_stop")

    def error(self, status: int, message: str) -> Json:
        kind = {400: "invalid_request_error", 429: "rate_limit_error"}.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def overflow(self, prompt: int, window: int) -> str:
        return f"prompt is too long: {prompt} tokens > {window} maximum"


def _head(body: Json) -> Json:
    kind = {"id": fresh("msg_"), "type": "message", "role": "assistant", "model": body.get("model", "")}
    return {**kind, "content": [], "stop_reason": None, "stop_sequence": None}


def _stop(reply: Reply) -> str:
    return "tool_use" if reply.calls else "end_turn"
