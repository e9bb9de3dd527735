"""Gemini generateContent and streamGenerateContent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from forge_ray.conformance.dialects.base import Json, Usage, Wire, fresh, slices, sse
from forge_ray.conformance.reply import Reply

_STATUS = {400: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}


class Gemini(Wire):
    name, routes = "gemini", (":generateContent", ":streamGenerateContent")
    cut_events = 4  # a tool call is a single event here, and close to the end

    def streams(self, path: str, body: Json) -> bool:
        return path.endswith(":streamGenerateContent")

    def messages(self, body: Json) -> Iterable[tuple[bool, str]]:
        yield False, _text((body.get("systemInstruction") or body.get("system_instruction") or {}).get("parts"))
        contents = body.get("contents") or ()
        for content in [contents] if isinstance(contents, dict) else contents:
            yield content.get("role") == "model", _text(content.get("parts"))

    def unary(self, reply: Reply, usage: Usage, body: Json) -> Json:
        return self._chunk(_parts(reply), usage, "STOP")

    def events(self, reply: Reply, usage: Usage, body: Json) -> Iterator[bytes]:
        for piece in slices(reply.reasoning):
            yield sse(self._chunk([{"text": piece, "thought": True}], usage))
        for piece in slices(reply.text):
            yield sse(self._chunk([{"text": piece}], usage))
        for part in _parts(Reply(calls=reply.calls)):
            yield sse(self._chunk([part], usage))
        yield sse(self._chunk([{"text": ""}], usage, "STOP"))

    def error(self, status: int, message: str) -> Json:
        return {"error": {"code": status, "message": message, "status": _STATUS.get(status, "UNKNOWN")}}

    def overflow(self, prompt: int, window: int) -> str:
        return f"The input token count ({prompt}) exceeds the maximum number of tokens allowed ({window})."

    def _chunk(self, parts: list[Json], usage: Usage, finish: str | None = None) -> Json:
        candidate: Json = {"index": 0, "content": {"role": "model", "parts": parts}, **({"finishReason": finish} if finish else {})}
        total = usage.prompt + usage.reply
        numbers = {"promptTokenCount": usage.prompt, "candidatesTokenCount": usage.reply, "totalTokenCount": total}
        return {"candidates": [candidate], "usageMetadata": numbers, "responseId": fresh(""), "modelVersion": "scripted"}


def _parts(reply: Reply) -> list[Json]:
    parts: list[Json] = []
    if reply.reasoning:
        parts.append({"text": reply.reasoning, "thought": True})
    if reply.text:
        parts.append({"text": reply.text})
    # As from the real service: a call has no id there, and the first of a turn carries the thought's signature.
    for number, call in enumerate(reply.calls):
        part: Json = {"functionCall": {"name": call.name, "args": json.loads(call.arguments)}}
        parts.append({**part, **({} if number else {"thoughtSignature": "c2lnbmF0dXJl"})})
    return parts


def _text(parts: object) -> str:
    texts = []
    for part in parts if isinstance(parts, list) else ():
        texts.append(part["text"] if isinstance(part.get("text"), str) else json.dumps(part, ensure_ascii=False))
    return "\n".join(texts)
