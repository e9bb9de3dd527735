"""From a chat reply to Gemini's form: parts, finish reason and usage, whole or chunk by chunk.

Text and thoughts are passed on as they come. A function call is one whole part, when its arguments are complete. The part that follows
thoughts, and the first call after them, carry them in their `thoughtSignature` (see `gemini_contents`). A call whose arguments are no JSON
object cannot be said in Gemini's form: it is left out, and the finish reason is MALFORMED_FUNCTION_CALL, as the API has it.
"""

from __future__ import annotations

import json
from typing import Any

from forge_ray.serve_proxy.dialects.fields import Json
from forge_ray.serve_proxy.dialects.gemini_contents import sign

_FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


class Parts:
    """Makes the parts of one reply. `thoughts`: whether thought parts are given out."""

    def __init__(self, thoughts: bool = True) -> None:
        self._give_thoughts = thoughts
        self._thoughts = ""
        self._signed: set[str] = set()
        self._calls: dict[int, Json] = {}
        """Calls whose arguments are still coming, by index: `{"id", "name", "arguments"}`."""
        self.malformed: str | None = None

    def message(self, message: Json) -> list[Json]:
        """Parts of a delta, or of a whole message (whose calls are complete; `flush` gives them)."""
        parts: list[Json] = []
        thought = message.get("reasoning") or message.get("reasoning_content")
        if thought:
            self._thoughts += thought
            self._signed.clear()
            if self._give_thoughts:
                parts.append({"text": thought, "thought": True})
        if message.get("content"):
            parts += self._complete()
            parts.append(self._sign({"text": message["content"]}, "text"))
        for position, call in enumerate(message.get("tool_calls") or ()):
            index = call.get("index", position)
            if index not in self._calls:
                parts += self.flush(cut=False)
                self._calls[index] = {"id": None, "name": None, "arguments": ""}
            known, function = self._calls[index], call.get("function") or {}
            known["id"] = call.get("id") or known["id"]
            known["name"] = function.get("name") or known["name"]
            known["arguments"] += function.get("arguments") or ""
        return parts

    def flush(self, *, cut: bool) -> list[Json]:
        """Parts of the calls that were still coming, and now are complete. `cut`: the reply ended at its length, maybe inside a call."""
        parts = []
        for call in self._calls.values():
            arguments = _object(call["arguments"])
            if arguments is None or not call["name"]:
                if not cut:
                    self.malformed = f"{call['name']}({call['arguments']})"
                continue
            said = {"name": call["name"], "args": arguments}
            parts.append(self._sign({"functionCall": {"id": call["id"], **said} if call["id"] else said}, "call"))
        self._calls.clear()
        return parts

    def last(self) -> list[Json]:
        """What a reply ends with that has thoughts and nothing else, or nothing at all: clients want a part in the last chunk."""
        return [self._sign({"text": ""}, "text")]

    def _complete(self) -> list[Json]:
        whole = all(call["arguments"].strip() and _object(call["arguments"]) is not None for call in self._calls.values())
        return self.flush(cut=False) if whole else []

    def _sign(self, part: Json, kind: str) -> Json:
        if self._thoughts and kind not in self._signed:
            self._signed.add(kind)
            part["thoughtSignature"] = sign(self._thoughts)
        return part


def response(chat: Json, *, thoughts: bool) -> Json:
    """A whole chat reply as a GenerateContentResponse."""
    choice = (chat.get("choices") or [{}])[0]
    parts, cut = Parts(thoughts), choice.get("finish_reason") == "length"
    said = parts.message(choice.get("message") or {})
    said += parts.flush(cut=cut)
    return chunk(chat, said or parts.last(), finish(choice.get("finish_reason"), parts), chat.get("usage"))


def finish(reason: str | None, parts: Parts) -> Json:
    """The fields of a candidate that say how it ended."""
    if parts.malformed is not None and reason != "length":
        return {"finishReason": "MALFORMED_FUNCTION_CALL", "finishMessage": f"Malformed function call: {parts.malformed}"}
    return {"finishReason": _FINISH.get(reason or "", "OTHER")}


def chunk(chat: Json, parts: list[Json], end: Json, used: Json | None) -> Json:
    """One GenerateContentResponse, of a stream or whole. `chat` gives its id and model; `end` is empty before the last one."""
    made: Json = {"candidates": [{"content": {"parts": parts, "role": "model"}, **end, "index": 0}]}
    if used is not None:
        made["usageMetadata"] = usage(used)
    return {**made, "modelVersion": chat.get("model"), "responseId": chat.get("id")}


def usage(chat: Json) -> Json:
    """`usageMetadata` of a chat reply's usage. The candidate's tokens do not hold those of its thoughts."""
    prompt, sampled = int(chat.get("prompt_tokens") or 0), int(chat.get("completion_tokens") or 0)
    thoughts = int((chat.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0)
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens")
    made = {"promptTokenCount": prompt, "candidatesTokenCount": sampled - thoughts, "totalTokenCount": prompt + sampled}
    if thoughts:
        made["thoughtsTokenCount"] = thoughts
    if cached:
        made["cachedContentTokenCount"] = int(cached)
    return made


def _object(arguments: str) -> Json | None:
    """Arguments as an object; none at all are an empty one."""
    if not arguments.strip():
        return {}
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
