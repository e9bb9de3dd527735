"""What the upstream needs of a wire protocol: the request as text, a reply as its body or its events, an error.

A request becomes a list of `Message`s whose roles are `user` and `assistant` only; whatever the model said between two messages of the
harness is one assistant message, however many items it takes on the wire. So `turn` of a script means the same here and in the engine.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from forge_ray.conformance.reply import Reply

Json = dict[str, Any]
TURN = "\n<|assistant|>\n"
"""Stands before each assistant message of a prompt, and at its end."""
SLICE = 7
"""Characters in one delta of a stream: odd, so that words, escapes and emoji sequences are cut."""


@dataclass(frozen=True)
class Usage:
    """Made-up token counts: a third of the characters, so that they grow with the history as real ones do."""

    prompt: int
    reply: int


class Wire(ABC):
    """One protocol."""

    name: str
    routes: tuple[str, ...]
    cut_events: int = 12
    """Events of a stream that are let through before it is cut: enough to be inside of a tool call."""

    def serves(self, path: str) -> bool:
        """Whether `path` (without query) asks for a completion."""
        return path.endswith(self.routes)

    def streams(self, path: str, body: Json) -> bool:
        """Whether a streamed answer is wanted."""
        return bool(body.get("stream"))

    def prompt(self, body: Json) -> str:
        """All the text of a request: declared tools, then the messages, `TURN` before each of the assistant's and at the end."""
        parts = [json.dumps(body.get("tools") or [], ensure_ascii=False)]
        spoke = False
        for assistant, text in self.messages(body):
            if assistant and not spoke:
                parts.append(TURN)
            spoke = assistant
            parts.append(text + "\n")
        return "".join(parts) + TURN

    @abstractmethod
    def messages(self, body: Json) -> Iterable[tuple[bool, str]]:
        """(whether it is the assistant's, text) in order; several in a row of the assistant's are one turn."""

    @abstractmethod
    def unary(self, reply: Reply, usage: Usage, body: Json) -> Json:
        """The body of a unary answer."""

    @abstractmethod
    def events(self, reply: Reply, usage: Usage, body: Json) -> Iterator[bytes]:
        """The events of a streamed answer, each ready to be sent."""

    @abstractmethod
    def error(self, status: int, message: str) -> Json:
        """An error's body."""

    @abstractmethod
    def overflow(self, prompt: int, window: int) -> str:
        """The message of a 400 for a prompt that does not fit, in the words that programs know it by."""


def text_of(content: Any) -> str:
    """The text in a message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(text_of(part.get("text") or part.get("content") or "") for part in content if isinstance(part, dict))
    return ""


def slices(text: str) -> Iterator[str]:
    """`text` in the pieces of a stream."""
    for start in range(0, len(text), SLICE):
        yield text[start : start + SLICE]


def fresh(prefix: str) -> str:
    """A new id."""
    return prefix + uuid.uuid4().hex[:24]


def sse(data: Json, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
