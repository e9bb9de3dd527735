"""OpenAI chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator

from forge_ray.conformance.dialects.base import Json, Usage, Wire, fresh, slices, sse, text_of
from forge_ray.conformance.reply import Reply


class Chat(Wire):
    name, routes = "chat", ("/chat/completions",)

    def messages(self, body: Json) -> Iterable[tuple[bool, str]]:
        for message in body.get("messages") or ():
            assistant = message.get("role") == "assistant"
            text = text_of(message.get("content"))
            if message.get("tool_calls"):
                text += json.dumps(message["tool_calls"], ensure_ascii=False)
            yield assistant, text

    def unary(self, reply: Reply, usage: Usage, body: Json) -> Json:
        message: Json = {"role": "assistant", "content": reply.text or None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                {"id": fresh("call_"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}
        return {**self._head(body, "chat.completion"), "choices": [choice], "usage": _usage(usage)}

    def events(self, reply: Reply, usage: Usage, body: Json) -> Iterator[bytes]:
        head = self._head(body, "chat.completion.chunk")

        def chunk(delta: Json, finish: str | None = None) -> bytes:
            return sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]})

        yield chunk({"role": "assistant", "content": ""})
        for piece in slices(reply.reasoning):
            yield chunk({"reasoning_content": piece})
        for piece in slices(reply.text):
            yield chunk({"content": piece})
        for index, call in enumerate(reply.calls):
            function = {"name": call.name, "arguments": ""}
            yield chunk({"tool_calls": [{"index": index, "id": fresh("call_"), "type": "function", "function": function}]})
            for piece in slices(call.arguments):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, _finish(reply))
        if (body.get("stream_options") or {}).get("include_usage"):
            yield sse({**head, "choices": [], "usage": _usage(usage)})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str) -> Json:
        kind = {400: "invalid_request_error", 429: "rate_limit_error"}.get(status, "server_error")
        code = "context_length_exceeded" if "maximum context length" in message else None
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def overflow(self, prompt: int, window: int) -> str:
        return f"This model's maximum context length is {window} tokens. However, your messages resulted in {prompt} tokens."

    def _head(self, body: Json, kind: str) -> Json:
        return {"id": fresh("chatcmpl-"), "object": kind, "created": int(time.time()), "model": body.get("model", "")}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "stop"


def _usage(usage: Usage) -> Json:
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.reply, "total_tokens": usage.prompt + usage.reply}
