"""Conversations as harnesses have them: every request is the one before with the reply and one more message behind it.

All servers of one run get the same bytes. The scripted reply is known beforehand, so a client need not read the answers to go on, and what
it costs does not hide what a server costs. Sizes are in tokens of the tiny model.
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPLY_TOKENS = 64
"""Of every reply, the end token included."""
MESSAGE_TOKENS = 1000
"""Of a message in the history that a conversation begins with."""
NEXT = "The command wrote this: 12 passed, 1 failed in test_parser.py at line 40. Look at it and say what comes next, please."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} in the workspace, and give back what came of it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read_file", "write_file", "run_command", "search")
]


@dataclass(frozen=True)
class Words:
    """What is said. Picklable and JSON-able: `vars`."""

    reply: str
    """Text of every reply: `REPLY_TOKENS - 1` tokens."""
    histories: dict[str, list[str]]
    """Size -> texts of the messages that a conversation begins with, users' and assistants' by turns."""

    @classmethod
    def of(cls, model: Path, sizes: dict[str, int]) -> Words:
        """For the tokenizer of `model`: histories of so many tokens."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        library = Path(sysconfig.get_path("stdlib"))
        text = "".join(file.read_text() for file in sorted(library.glob("*.py"))[:40])
        ids = tokenizer.encode(text[: 8 * max(sizes.values())], add_special_tokens=False).ids
        texts = [tokenizer.decode(ids[at : at + MESSAGE_TOKENS]) for at in range(0, max(sizes.values()), MESSAGE_TOKENS)]
        histories = {name: texts[: max(1, (size - 200) // MESSAGE_TOKENS)] for name, size in sizes.items()}
        # An odd number, so that a user has the last word.
        return cls(
            _round_trip(tokenizer, REPLY_TOKENS - 1), {name: texts[: len(texts) - 1 + len(texts) % 2] for name, texts in histories.items()}
        )


def _round_trip(tokenizer: Any, length: int) -> str:
    """A text of exactly `length` tokens that comes back as the same tokens."""
    text = " ".join(f"I look at line {line} of the file and change the name of the value." for line in range(10, 40))
    for end in range(length, len(text)):
        ids = tokenizer.encode(text[:end], add_special_tokens=False).ids
        if len(ids) == length and text[end - 1].isalpha() and tokenizer.decode(ids) == text[:end]:
            return text[:end]
    raise ValueError(f"no text of {length} tokens found")


@dataclass
class Conversation:
    """One session's conversation with one server."""

    words: Words
    size: str
    name: str
    """Stands in the system message, so no two conversations are the same."""
    turns: int = 0
    _tail: list[bytes] = field(default_factory=list)

    def body(self, streamed: bool) -> bytes:
        """The next request."""
        if not hasattr(self, "_head"):
            self._head = self._begin()
        extra = b'"stream":true,"stream_options":{"include_usage":true},' if streamed else b""
        return b"".join([b'{"model":"policy",', extra, self._head, *self._tail, b"]}"])

    def answered(self) -> None:
        """The reply came; the user says the next thing."""
        if not self._tail:
            said = json.dumps([{"role": "assistant", "content": self.words.reply}, {"role": "user", "content": NEXT}])
            self._piece = b"," + said[1:-1].encode()
        self._tail.append(self._piece)
        self.turns += 1

    def _begin(self) -> bytes:
        messages = [{"role": "system", "content": f"You are a coding agent. Your workspace is /workspace/{self.name}."}]
        roles = ("user", "assistant")
        messages += [{"role": roles[at % 2], "content": text} for at, text in enumerate(self.words.histories[self.size])]
        return f'"tools":{json.dumps(TOOLS)},"messages":{json.dumps(messages)[:-1]}'.encode()
