"""What an upstream's reply says, put together while it passes by: text, reasoning, tool calls with the arguments as they came, logprobs.

Unlike `dialects.Reply`, which looks for what matters to a recorded call of the policy, these readers keep everything: there are no tokens
behind a reply of another model. They hold back nothing and never raise for what an upstream sends; what cannot be read is left out.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_ray.serve_proxy.dialects.base import parse_object
from forge_ray.serve_proxy.dialects.fields import Json
from forge_ray.serve_proxy.sse import SseData

LEAST = -9999.0
"""In the place of a log-probability of minus infinity, which JSON has no word for."""
CUT = ("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded")


@dataclass
class Said:
    """One choice."""

    text: str = ""
    reasoning: str = ""
    calls: dict[Any, dict[str, str]] = field(default_factory=dict)
    """By whatever tells them apart in the dialect, in the order of their beginning."""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    bytes: dict[str, list[int]] = field(default_factory=dict)

    def call(self, key: Any, *, id: Any = None, name: Any = None, arguments: Any = None) -> None:
        """Take in a piece of a tool call."""
        made = self.calls.setdefault(key, {"id": "", "name": "", "arguments": ""})
        made["id"] = made["id"] or (id if isinstance(id, str) else "")
        made["name"] = made["name"] or (name if isinstance(name, str) else "")
        made["arguments"] += arguments if isinstance(arguments, str) else ""

    def scored(self, entries: Any) -> None:
        """Take in log-probabilities as OpenAI's dialects give them: `[{"token", "logprob", "bytes", "top_logprobs"} …]`."""
        for entry in entries if isinstance(entries, list) else ():
            token = entry.get("token") if isinstance(entry, dict) else None
            if not isinstance(token, str):
                continue
            given = entry.get("bytes")
            if isinstance(given, list) and bytes(given) != token.encode(errors="surrogatepass"):
                self.bytes[str(len(self.tokens))] = given
            self.tokens.append(token)
            self.logprobs.append(_number(entry.get("logprob")))
            top = entry.get("top_logprobs")
            if isinstance(top, list):
                self.top.append({str(one.get("token")): _number(one.get("logprob")) for one in top if isinstance(one, dict)})

    def reply(self) -> Json:
        """As `trajectories.upstream.UpstreamCall.reply`."""
        calls = list(self.calls.values())
        return {"text": self.text, "reasoning": self.reasoning, "tool_calls": calls, "finish_reason": self.finish_reason}

    def scores(self) -> Json | None:
        """As `trajectories.upstream.UpstreamCall.logprobs`."""
        if not self.tokens:
            return None
        found: Json = {"tokens": self.tokens, "logprobs": self.logprobs}
        if any(self.top):
            found["top"] = self.top
        return found | ({"bytes": self.bytes} if self.bytes else {})


class UpstreamReply(ABC):
    """Reads one successful response."""

    def __init__(self, streamed: bool) -> None:
        self.streamed = streamed
        self.said: dict[int, Said] = {}
        """By the number of the choice."""
        self.usage: Json | None = None
        self.ended = False
        """Its proper end has come, or at least begun: nothing that matters to a client is left to be said."""
        self._sse, self._body = SseData(), bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take in the next piece of the body."""
        if not self.streamed:
            self._body += chunk
            return
        for data in self._sse.feed(chunk):
            event = parse_object(data)
            if event is not None:
                self._safely(self.event, event)

    def close(self) -> None:
        """The body is over."""
        if self.streamed:
            self.feed(b"\n")
            return
        body = parse_object(bytes(self._body))
        if body is not None:
            self._safely(self.body, body)
            self.ended = self.ended or any(said.finish_reason is not None for said in self.said.values())

    @property
    def first(self) -> Said:
        return self.of(0)

    @property
    def cut(self) -> bool:
        """It ended at its length."""
        return self.first.finish_reason in CUT

    def of(self, number: Any) -> Said:
        return self.said.setdefault(number if isinstance(number, int) else 0, Said())

    def _safely(self, read: Any, value: Json) -> None:
        try:
            read(value)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return  # not of this dialect: it passes by unread

    @abstractmethod
    def event(self, event: Json) -> None:
        """One event of a stream."""

    @abstractmethod
    def body(self, body: Json) -> None:
        """A whole response."""


class ChatReply(UpstreamReply):
    """OpenAI chat completions and completions."""

    def event(self, event: Json) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self._choice(choice, choice.get("delta") or {})
        self.ended = bool(self.said) and all(said.finish_reason is not None for said in self.said.values())

    def body(self, body: Json) -> None:
        self.usage = body.get("usage")
        for choice in body.get("choices") or ():
            self._choice(choice, choice.get("message") or {})

    def _choice(self, choice: Json, message: Json) -> None:
        said = self.of(choice.get("index"))
        said.text += _text(message.get("content")) + _text(choice.get("text"))
        said.reasoning += _text(message.get("reasoning") or message.get("reasoning_content"))
        for place, call in enumerate(message.get("tool_calls") or ()):
            what = call.get("function") or call.get("custom") or {}
            arguments = what.get("arguments", what.get("input"))
            said.call(call.get("index", place), id=call.get("id"), name=what.get("name"), arguments=arguments)
        said.finish_reason = choice.get("finish_reason") or said.finish_reason
        scores = choice.get("logprobs") or {}
        said.scored(scores.get("content"))
        tokens = _list(scores.get("tokens"))
        tops = _list(scores.get("top_logprobs")) or [None for _ in tokens]
        for token, value, top in zip(tokens, _list(scores.get("token_logprobs")), tops, strict=False):
            most = [{"token": name, "logprob": given} for name, given in top.items()] if isinstance(top, dict) else None
            said.scored([{"token": token, "logprob": value, "top_logprobs": most}])


class ResponsesReply(UpstreamReply):
    """OpenAI responses. The last event holds the whole response; what came before counts where the stream is cut."""

    def event(self, event: Json) -> None:
        kind = event.get("type")
        if kind == "response.output_text.delta":
            self.first.text += _text(event.get("delta"))
            self.first.scored(event.get("logprobs"))
        elif kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
            self.first.reasoning += _text(event.get("delta"))
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            self.ended = kind != "response.failed"
            streamed = self.first
            self.said.clear()
            self.body(event["response"])
            if not self.first.tokens:
                self.first.tokens, self.first.logprobs = streamed.tokens, streamed.logprobs
                self.first.top, self.first.bytes = streamed.top, streamed.bytes

    def body(self, body: Json) -> None:
        self.usage = body.get("usage") or self.usage
        said = self.first
        for place, item in enumerate(body.get("output") or ()):
            kind = item.get("type")
            if kind == "message":
                for part in _list(item.get("content")):
                    said.text += _text(part.get("text"))
                    said.scored(part.get("logprobs"))
            elif kind == "reasoning":
                said.reasoning += "".join(_text(part.get("text")) for part in _list(item.get("content")) or _list(item.get("summary")))
            elif kind in ("function_call", "custom_tool_call"):
                arguments = item.get("arguments", item.get("input"))
                said.call(place, id=item.get("call_id"), name=item.get("name"), arguments=arguments)
        reason = (body.get("incomplete_details") or {}).get("reason")
        said.finish_reason = {"completed": "stop", "incomplete": reason or "incomplete"}.get(str(body.get("status")))


class MessagesReply(UpstreamReply):
    """Anthropic messages."""

    def event(self, event: Json) -> None:
        kind, said = event.get("type"), self.first
        if kind == "message_start":
            self.usage = dict(event["message"].get("usage") or {})
        elif kind == "content_block_start":
            self._block(event.get("index"), event.get("content_block") or {}, started=True)
        elif kind == "content_block_delta":
            delta = event.get("delta") or {}
            said.text += _text(delta.get("text"))
            said.reasoning += _text(delta.get("thinking"))
            if "partial_json" in delta:
                said.call(event.get("index"), arguments=delta["partial_json"])
        elif kind == "message_delta":
            said.finish_reason = (event.get("delta") or {}).get("stop_reason") or said.finish_reason
            self.usage = {**(self.usage or {}), **(event.get("usage") or {})}
        elif kind == "message_stop":
            self.ended = True

    def body(self, body: Json) -> None:
        self.usage = body.get("usage")
        for place, block in enumerate(body.get("content") or ()):
            self._block(place, block, started=False)
        self.first.finish_reason = body.get("stop_reason")

    def _block(self, place: Any, block: Json, *, started: bool) -> None:
        self.first.text += _text(block.get("text"))
        self.first.reasoning += _text(block.get("thinking"))
        if block.get("type") == "tool_use":
            # A stream begins with an empty object and sends the text of the arguments afterwards.
            arguments = None if started and not block.get("input") else json.dumps(block.get("input"), ensure_ascii=False)
            self.first.call(place, id=block.get("id"), name=block.get("name"), arguments=arguments)


READERS: Mapping[str, type[UpstreamReply]] = {
    "chat": ChatReply,
    "completions": ChatReply,
    "responses": ResponsesReply,
    "messages": MessagesReply,
}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "".join(_text(part.get("text")) for part in value if isinstance(part, dict))
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else LEAST
    return number if math.isfinite(number) else LEAST
