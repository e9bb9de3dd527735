"""Gemini: generateContent, streamGenerateContent and countTokens, as a translation onto the chat dialect of vLLM's app.

The only dialect that vLLM does not speak. The request becomes a chat request (`gemini_request`), the response is put back into Gemini's
form on its way out (`gemini_send`); in between everything is as in the chat dialect, so calls are recorded, spliced and ended alike. The
model is in the path: `/v1beta/models/{model}:generateContent`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from typing import Any, Literal
from urllib.parse import parse_qs

from forge_ray.serve_proxy.dialects import gemini_fields
from forge_ray.serve_proxy.dialects.base import Dialect, Inner, Overflow, Reply, ReplyClass, parse_object
from forge_ray.serve_proxy.dialects.fields import Json
from forge_ray.serve_proxy.dialects.refusal import Refusal

_PATH = re.compile(r"/v1(?:beta|alpha)?/models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)")
_LISTING = re.compile(r"/v1(?:beta|alpha)?/models(?:/(?P<model>[^:]+))?")
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPE = "type.googleapis.com/google.rpc."
_REQUEST = "forge_ray.serve_proxy.dialects.gemini_request"
_RENAMED = {ours: f"generationConfig.{theirs}" for theirs, ours in gemini_fields.SAMPLING.items()}


def speaks(path: str) -> bool:
    """Whether a path is one of Gemini's API."""
    return _PATH.fullmatch(path) is not None or path.startswith(("/v1beta/", "/v1alpha/"))


def model_card(path: str, name: str, window: int) -> Json | None:
    """The answer to a GET of the models or of one of them; None where the path is no such thing."""
    found = _LISTING.fullmatch(path)
    if found is None:
        return None
    card = {
        "name": f"models/{found['model'] or name}",
        "version": "001",
        "displayName": found["model"] or name,
        "description": "The policy",
        "inputTokenLimit": window,
        "outputTokenLimit": window,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    return card if found["model"] else {"models": [card]}


class GeminiReply(Reply):
    """Reads a body of Gemini's form: one response, server-sent events, or an array of responses."""

    def feed(self, chunk: bytes, last: bool) -> None:
        if self.streamed:
            super().feed(chunk, last)
            return
        self._body += chunk
        if last:
            whole = _parse(bytes(self._body))
            for response in whole if isinstance(whole, list) else [whole]:
                if isinstance(response, dict):
                    self.body(response)

    def event(self, data: bytes) -> None:
        if b'"functionCall":{' in data or b'"finishReason":"' in data:
            self.body(parse_object(data) or {})

    _called = False

    def body(self, body: Json) -> None:
        if "totalTokens" in body:
            self.complete = True
        for candidate in body.get("candidates") or ():
            for part in (candidate.get("content") or {}).get("parts") or ():
                if "functionCall" in part:
                    self._called = True
                    self.note(part["functionCall"].get("id"))
                self.note((part.get("functionCall") or {}).get("id"))
            reason = candidate.get("finishReason")
            if reason is not None:
                self.complete, self.usage = True, body.get("usageMetadata")
                replies: dict[str, ReplyClass] = {"STOP": "tool_calls" if self._called else "answer", "MAX_TOKENS": "length"}
                self.reply = replies.get(reason)


class Gemini(Dialect):
    """`POST …/models/{model}:generateContent`, `:streamGenerateContent` (with `?alt=sse` as server-sent events, else as a JSON array) and
    `:countTokens`, below `/v1beta`, `/v1` or `/v1alpha`; `GET …/models`, `…/models/{model}`. The key comes as `x-goog-api-key` or `?key=`.
    Field names may be in snake case, a single object may stand where a list is wanted.

    The requests become chat requests, field by field as below:

    - Contents of the model in a row are one turn, contents of the user stay apart. Parts of one content stay in their order.
    - A function response goes to the call of its id, else to the first open call of its name. What the model sees of it is the value of
      `output` or `result` where that is all there is, else the whole response as JSON.
    - Reasoning goes out as thought parts. The next part, and the first function call, carry it in their `thoughtSignature` too, from which
      it is taken when they come back: Gemini CLI drops thoughts and keeps signatures, so its turns go on from the sampled tokens.
    - `parameters` and `responseSchema` are turned into JSON Schema (lower-case types, `nullable`); `parametersJsonSchema` stays as it is.
    - A call that has no JSON object for arguments cannot be said in this form: the reply ends with `MALFORMED_FUNCTION_CALL`.
    - Usage numbers are the engine's; thoughts are counted apart from the candidate.
    - Errors are Google's (`INVALID_ARGUMENT`, `RESOURCE_EXHAUSTED` with `RetryInfo`, …); a prompt that does not fit is told as `The input
      token count (N) exceeds the maximum number of tokens allowed (M).`
    """

    name, path = "gemini", "/v1beta/models/{model}:generateContent"
    uncounted = ("/v1beta/models/{model}:countTokens",)
    caps = ("max_completion_tokens",)
    reply = GeminiReply
    fields = gemini_fields.FIELDS

    def route(self, path: str) -> Literal["call", "uncounted"] | None:
        found = _PATH.fullmatch(path)
        if found is None:
            return None
        return "uncounted" if found["method"] == "countTokens" else "call"

    _ready = False

    async def prepare(self) -> None:
        if not self._ready:
            await asyncio.to_thread(importlib.import_module, _REQUEST)  # the types take long to load: not in the event loop
            self._ready = True

    def translate(self, body: Json, path: str, query: str) -> Inner | Refusal:
        from forge_ray.serve_proxy.dialects.gemini_reply import response
        from forge_ray.serve_proxy.dialects.gemini_request import chat_request
        from forge_ray.serve_proxy.dialects.gemini_send import Stream, Whole

        found = _PATH.fullmatch(path)
        if found is None:
            return Refusal(404, f"Unknown route: {path}")
        if found["method"] == "countTokens":
            asked = body.get("generateContentRequest") or body.get("generate_content_request")
            body = asked if isinstance(asked, dict) else body
        made = chat_request(body, found["model"].removeprefix("models/"))
        if isinstance(made, Refusal):
            return made
        chat, ignored = made
        if found["method"] == "countTokens":
            count = {name: chat[name] for name in ("model", "messages", "tools") if name in chat}
            for message in count["messages"]:
                if "reasoning_content" in message:
                    message["reasoning"] = message.pop("reasoning_content")
            return Inner("/tokenize", count, True, tuple(ignored), lambda send: Whole(send, _counted))
        config = body.get("generationConfig") or body.get("generation_config") or {}
        thinking = config.get("thinkingConfig") or config.get("thinking_config") or {}
        thoughts = thinking.get("includeThoughts", thinking.get("include_thoughts")) is not False
        if found["method"] == "generateContent":
            return Inner(_CHAT, chat, True, tuple(ignored), lambda send: Whole(send, lambda reply: response(reply, thoughts=thoughts)))
        sse = parse_qs(query).get("alt") == ["sse"]
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return Inner(_CHAT, chat, True, tuple(ignored), lambda send: Stream(send, sse=sse, thoughts=thoughts))

    def refuse(self, body: Json) -> Refusal | None:
        return None  # `translate` has looked at what the client sent

    def unheeded(self, body: Json, *, forced: bool) -> list[str]:
        return [_RENAMED[name] for name in body if name in _RENAMED] if forced else []

    def adapt(self, body: Json) -> bool:
        return False

    def error(self, refusal: Refusal, request_id: str) -> Json:
        details: list[Json] = [{"@type": f"{_TYPE}RequestInfo", "requestId": request_id}]
        if refusal.status in (429, 503):
            details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{refusal.retry_after_s or 1}s"})
        if refusal.status == 401:
            details.append({"@type": f"{_TYPE}ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com"})
        if refusal.param is not None:
            violation = {"field": refusal.param, "description": refusal.message}
            details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
        status = _STATUS.get(refusal.status, "INTERNAL" if refusal.status >= 500 else "INVALID_ARGUMENT")
        return {"error": {"code": refusal.status, "message": refusal.message, "status": status, "details": details}}

    def overflow(self, overflow: Overflow) -> Refusal:
        count = f" ({overflow.prompt})" if overflow.prompt else ""
        return Refusal(400, f"The input token count{count} exceeds the maximum number of tokens allowed ({overflow.window}).")


_CHAT = "/v1/chat/completions"


def _counted(reply: Json) -> Json:
    return {"totalTokens": reply["count"]}


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
