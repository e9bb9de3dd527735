"""From Gemini's contents to chat messages.

A content of the model becomes one assistant message; several in a row become one (a client that keeps the pieces of a stream sends them
back so), their texts joined without a separator, since they are one text in pieces. A content of the user becomes a user message, and a
tool message for each function response, in the order of the parts. User contents in a row stay apart.

Reasoning comes back in one of two ways: as thought parts, or inside the `thoughtSignature` of the part that followed it. A client that
drops thoughts from its history returns signatures all the same (the real API needs them), so they carry the reasoning itself.

Calls and responses are matched by id, and where a client uses none by name and order among the calls of the last turn of the model. A call
without an id gets one by its place in the history, which is the same in every later request.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable
from typing import Any

from forge_ray.serve_proxy.dialects.fields import Json
from forge_ray.serve_proxy.dialects.gemini_fields import UNUSABLE_PARTS
from forge_ray.serve_proxy.dialects.refusal import Refusal

_MAGIC = b"thoughts:"
_MAX_THOUGHTS = 8 * 2**20
"""Bytes that a signature may unfold to."""
_RESULTS = ("output", "result")
"""A response with one of these keys and no other is what it holds."""


class Invalid(Exception):
    """The request cannot be served; `refusal` says why."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.refusal = Refusal(400, message, param)


def sign(thoughts: str) -> str:
    """A `thoughtSignature` that holds `thoughts`."""
    return base64.b64encode(_MAGIC + zlib.compress(thoughts.encode(), 6)).decode()


def read_signature(signature: Any) -> str | None:
    """The thoughts in a signature, or None for one that is not ours (clients put constants there)."""
    if not isinstance(signature, str):
        return None
    try:
        data = _decode(signature)
        if not data.startswith(_MAGIC):
            return None
        unfold = zlib.decompressobj()
        text = unfold.decompress(data[len(_MAGIC) :], _MAX_THOUGHTS)
        return text.decode() if unfold.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None


def messages(system: Json | None, contents: Iterable[Json]) -> list[Json]:
    """Chat messages of a system instruction and contents (both in the API's own spelling). Raises `Invalid`."""
    history = _History()
    if system is not None:
        history.system(system)
    for position, content in enumerate(contents):
        role, parts, where = content.get("role") or "user", content.get("parts") or [], f"contents[{position}]"
        if role == "model":
            history.model(parts, where)
        elif role in ("user", "function", "tool"):
            history.user(parts, where)
        else:
            raise Invalid(f"Please use a valid role: user, model. Found {role!r} in {where}.", f"{where}.role")
    return history.messages


class _History:
    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._calls = 0
        self._open: list[Json] = []
        """Calls of the last turn of the model that have no response yet."""

    def system(self, content: Json) -> None:
        parts = content.get("parts") or []
        for number, part in enumerate(parts):
            if not isinstance(part.get("text"), str):
                raise Invalid("A system instruction is text.", f"systemInstruction.parts[{number}]")
        texts = [{"type": "text", "text": part["text"]} for part in parts if part["text"]]
        if texts:
            self.messages.append({"role": "system", "content": texts[0]["text"] if len(texts) == 1 else texts})

    def model(self, parts: list[Json], where: str) -> None:
        if not parts:
            return
        text, thoughts, calls = "", "", []
        signed: str | None = None
        for number, part in enumerate(parts):
            at = f"{where}.parts[{number}]"
            _refuse(part, at)
            signed = max(signed, read_signature(part.get("thoughtSignature")), key=lambda thoughts: len(thoughts or ""))
            if "functionCall" in part:
                calls.append(self._call(part["functionCall"], at))
            elif "functionResponse" in part or "inlineData" in part:
                raise Invalid(f"{at}: the model says text and function calls only.", at)
            elif part.get("thought"):
                thoughts += part.get("text") or ""
            else:
                text += part.get("text") or ""
        last = self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None
        if last is None:
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
            self._open = []
        already = last.get("reasoning_content", "")
        if signed is not None and signed.startswith(already):  # a signature holds all thoughts of the turn up to it
            last["reasoning_content"] = signed
        elif signed is not None or thoughts:
            last["reasoning_content"] = already + (signed if signed is not None else thoughts)
        last["content"] = (last["content"] or "") + text
        if calls:
            last.setdefault("tool_calls", []).extend(calls)
            self._open += calls
        if not last["content"] and "tool_calls" in last:
            last["content"] = None

    def _call(self, call: Any, at: str) -> Json:
        if not isinstance(call, dict) or not call.get("name"):
            raise Invalid(f"{at}.functionCall has no name.", f"{at}.functionCall.name")
        number, self._calls = self._calls, self._calls + 1
        arguments = json.dumps(call.get("args") or {}, ensure_ascii=False)
        return {"id": call.get("id") or f"call{number:05}", "type": "function", "function": {"name": call["name"], "arguments": arguments}}

    def user(self, parts: list[Json], where: str) -> None:
        ids = self._match([part["functionResponse"] for part in parts if isinstance(part.get("functionResponse"), dict)])
        said: list[Json] = []

        def say() -> None:
            if said:
                plain = len(said) == 1 and said[0]["type"] == "text"
                self.messages.append({"role": "user", "content": said[0]["text"] if plain else list(said)})
                said.clear()

        for number, part in enumerate(parts):
            at = f"{where}.parts[{number}]"
            _refuse(part, at)
            if "functionCall" in part:
                raise Invalid(f"{at}: a functionCall is said by the model.", at)
            if "functionResponse" in part:
                say()
                response = part["functionResponse"]
                if not isinstance(response, dict) or not response.get("name"):
                    raise Invalid(f"{at}.functionResponse has no name.", f"{at}.functionResponse.name")
                self.messages.append({"role": "tool", "tool_call_id": ids.pop(0), "content": _result(response, at)})
            elif "inlineData" in part:
                said.append(_inline(part["inlineData"], at))
            elif isinstance(part.get("text"), str):
                said.append({"type": "text", "text": part["text"]})
        say()

    def _match(self, responses: list[Json]) -> list[str]:
        """The call id of each response: its own if that names an open call, else that of the first open call of its name, else its own or
        a new one (a response whose call a compaction dropped)."""
        ids: list[str | None] = []
        for response in responses:
            mine = next((call for call in self._open if response.get("id") and call["id"] == response["id"]), None)
            if mine is not None:
                self._open.remove(mine)
            ids.append(mine["id"] if mine is not None else None)
        for number, response in enumerate(responses):
            if ids[number] is None:
                mine = next((call for call in self._open if call["function"]["name"] == response.get("name")), None)
                if mine is not None:
                    self._open.remove(mine)
                    ids[number] = mine["id"]
        found = []
        for call, response in zip(ids, responses, strict=True):
            if call is None:
                call = response.get("id") or f"call{self._calls:05}"
                self._calls += 1
            found.append(call)
        return found


def _refuse(part: Json, at: str) -> None:
    for name, reason in UNUSABLE_PARTS.items():
        if name in part:
            raise Invalid(f"Unsupported part {at}.{name}: {reason}.", f"{at}.{name}")


def _result(response: Json, at: str) -> str | list[Json]:
    """What a tool message says: the result itself where the response is nothing but a result, else the response as JSON."""
    value = response.get("response") or {}
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in _RESULTS:
        value = next(iter(value.values()))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    media = []
    for number, part in enumerate(response.get("parts") or []):
        _refuse(part, f"{at}.functionResponse.parts[{number}]")
        media.append(_inline(part.get("inlineData"), f"{at}.functionResponse.parts[{number}]"))
    return [{"type": "text", "text": text}, *media] if media else text


def _inline(blob: Any, at: str) -> Json:
    kind = blob.get("mimeType") if isinstance(blob, dict) else None
    if not isinstance(kind, str) or not isinstance(blob.get("data"), str):
        raise Invalid(f"{at}.inlineData needs mimeType and data.", f"{at}.inlineData")
    try:
        data = _decode(blob["data"])
        if kind.startswith("text/"):
            return {"type": "text", "text": data.decode()}
    except ValueError:
        raise Invalid(f"Base64 decoding failed for {at}.inlineData.data.", f"{at}.inlineData.data") from None
    if not kind.startswith("image/"):
        raise Invalid(f"Unsupported MIME type in {at}.inlineData: {kind}.", f"{at}.inlineData.mimeType")
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


def _decode(text: str) -> bytes:
    """Base64 of either alphabet, padded or not: clients use all of them. Raises `ValueError`."""
    plain = text.translate(str.maketrans("-_", "+/")).rstrip("=")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
