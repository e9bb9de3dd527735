"""What the edge must know of a wire protocol: its fields, its errors, and what a reply of it says.

A dialect is a pure description; it never sees a session or a token id. Everything that vLLM's own app does for the dialect stays
there. `Reply` watches a response pass by and holds back nothing.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.types import Send

from forge_ray.serve_proxy import identity
from forge_ray.serve_proxy.dialects.fields import Fields, Json
from forge_ray.serve_proxy.dialects.refusal import Refusal
from forge_ray.serve_proxy.sse import SseData

ReplyClass = Literal["answer", "tool_calls", "length"]


@dataclass(frozen=True)
class Overflow:
    """A prompt that does not fit."""

    window: int
    """Tokens that one call may have."""
    prompt: int | None = None
    """Tokens of the prompt, where they were counted to the end."""


@dataclass(frozen=True)
class Inner:
    """A request in the form in which vLLM's app takes it."""

    path: str
    """Route of the app."""
    body: Json
    translated: bool = False
    """`body` is not what came."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that the translation left out because they have no effect here."""
    wrap: Callable[[Send], Send] = lambda send: send
    """Makes, around the client's `send`, the one for the app: it puts a successful response back into the dialect, piece by piece."""


class Reply(ABC):
    """Reads one successful response while it is passed on: its class, its usage, whether it came to its proper end."""

    def __init__(self, streamed: bool) -> None:
        self.streamed = streamed
        self.reply: ReplyClass | None = None
        self.usage: Json | None = None
        self.complete = False
        """The dialect's last event was seen (streamed), or the whole body could be read (unary)."""
        self.issued: list[str] = []
        """Ids that the reply gives to its tool calls and items, so far."""
        self._sse, self._body = SseData(), bytearray()

    def feed(self, chunk: bytes, last: bool) -> None:
        """Take in the next piece of the body."""
        if self.streamed:
            for data in self._sse.feed(chunk):
                self.event(data)
            return
        self._body += chunk
        if last:
            body = parse_object(bytes(self._body))
            if body is not None:
                self.complete = True
                self.body(body)

    def note(self, *names: Any) -> None:
        """Take down ids that the reply gives out; the client may send them back."""
        self.issued += [name for name in names if isinstance(name, str) and name not in self.issued]

    @abstractmethod
    def event(self, data: bytes) -> None:
        """One `data:` payload of the stream. Called for every chunk: decode only what matters."""

    @abstractmethod
    def body(self, body: Json) -> None:
        """The whole body of a unary response."""


class Dialect(ABC):
    """One wire protocol."""

    name: identity.Dialect
    path: str
    """The route that asks for a completion."""
    uncounted: tuple[str, ...] = ()
    """Routes of the dialect that never reach the engine's sampler."""
    caps: tuple[str, ...]
    """Fields that bound the number of sampled tokens."""
    reply: Callable[[bool], Reply]
    """Makes the reader of a response (`streamed`)."""
    fields: Fields = Fields()
    """What is done with each field of a request."""
    keep_alive = b": keep-alive\n\n"
    """Sent into a silent stream: clients ignore it, their stall detectors do not."""

    def route(self, path: str) -> Literal["call", "uncounted"] | None:
        """What a request to `path` is: one for a completion, one that never reaches the sampler, or none of this dialect."""
        return "call" if path == self.path else "uncounted" if path in self.uncounted else None

    async def prepare(self) -> None:
        """Load what the dialect needs, before its first request is looked at."""
        return None

    def translate(self, body: Json, path: str, query: str) -> Inner | Refusal:
        """The request for vLLM's app, where the app does not speak this dialect itself. `body` stays as it is."""
        return Inner(path, body)

    @abstractmethod
    def error(self, refusal: Refusal, request_id: str) -> Json:
        """The dialect's error body."""

    @abstractmethod
    def overflow(self, overflow: Overflow) -> Refusal:
        """The dialect's own words for a prompt that does not fit: harnesses know it by nothing else."""

    def stream_error(self, refusal: Refusal, request_id: str) -> bytes:
        """The event that ends a stream which has begun and cannot go on."""
        return f"data: {json.dumps(self.error(refusal, request_id))}\n\n".encode()

    def refuse(self, body: Json) -> Refusal | None:
        """Why a request cannot be served as what it asks for, or None."""
        return self.fields.refuse(body)

    def unheeded(self, body: Json, *, forced: bool) -> list[str]:
        """What in a request has no effect here, by name. `forced`: the policy's sampling parameters replace the request's."""
        return self.fields.unheeded(body, forced=forced)

    def adapt(self, body: Json) -> bool:
        """Change in place what vLLM's app would refuse or mistake although the request is well formed; whether anything changed."""
        return self.fields.remove(body)

    def clamp(self, body: Json, window: int) -> tuple[int | None, bool]:
        """An output cap is an upper bound: cut those above `window`. Returns the smallest cap as asked for, and whether `body` changed."""
        asked, changed = None, False
        for field in self.caps:
            value = body.get(field)
            if isinstance(value, int) and not isinstance(value, bool):
                asked = value if asked is None else min(asked, value)
                if value > window:
                    body[field], changed = window, True
        return asked, changed


_NONCE = "x-anthropic-billing-header:"


def without_nonce(text: Any) -> str | None:
    """`text` without Claude Code's first line, which differs from request to request and so would end every shared prefix; None where
    there is none. vLLM drops it too, but only where it is a block of its own."""
    if not isinstance(text, str) or not text.startswith(_NONCE):
        return None
    return text.partition("\n")[2]


def parse_object(data: bytes) -> Json | None:
    """`data` as a JSON object, or None."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_OVERFLOW = re.compile(
    r"maximum context length|exceeds the max_model_len|longer than the maximum model length|max_tokens must be at least 1, got 0"
)
_PROMPT_TOKENS = re.compile(r"contains (\d+) (?:input )?tokens|prompt length (\d+)|Input length \((\d+)\)|prompt \(length (\d+)\)")


def read_overflow(message: str, window: int, asked: int | None) -> Overflow | None:
    """Whether an error text of the engine's server means that the prompt did not fit, by its words.

    A cap of 0 in the request gives the same text as a window with no room for one token: that one is the request's own fault.
    """
    if not _OVERFLOW.search(message) or asked == 0:
        return None
    found = _PROMPT_TOKENS.search(message)
    return Overflow(window, next((int(group) for group in found.groups() if group), None) if found else None)
