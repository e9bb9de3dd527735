"""A chat model's surroundings in small: a greedy tokenizer with merges, a chat template, and parsers of thinking and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from forge_ray.serve_proxy.turns import Turn

START, END, OTHER_END = "<s>", "<e>", "<f>"
PIECES = [
    *(START, END, OTHER_END),
    *(chr(code) for code in range(32, 127)),
    *("\n", "\n\n", "he", "llo", "hello", "lo", "assistant", "user", "<call>", "</call>", "<think>", "</think>", '": "', '", "', ': "'),
]
IDS = {piece: number for number, piece in enumerate(PIECES)}
_LONGEST = max(map(len, PIECES))


def encode(text: str) -> list[int]:
    """The longest piece first."""
    ids, at = [], 0
    while at < len(text):
        piece = next(text[at : at + n] for n in range(_LONGEST, 0, -1) if text[at : at + n] in IDS)
        ids.append(IDS[piece])
        at += len(piece)
    return ids


def pieces(*names: str) -> list[int]:
    """Ids of these very pieces."""
    return [IDS[name] for name in names]


def spelled(text: str, end: str | None = END) -> list[int]:
    """A reply sampled letter by letter: the same text in other tokens than the tokenizer's."""
    return [IDS[letter] for letter in text] + ([IDS[end]] if end else [])


def say(text: str = "", *calls: tuple[str, Any], thinking: str = "") -> str:
    """What a model writes."""
    written = f"<think>{thinking}</think>" if thinking else ""
    written += text
    for name, arguments in calls:
        written += f"<call>{name} {arguments if isinstance(arguments, str) else json.dumps(arguments)}</call>"
    return written


def render(
    messages: Sequence[Mapping[str, Any]], *, open_: bool = True, strips: bool = False, system: str = "", tools: str = ""
) -> list[int]:
    """The chat template; `strips`: it drops the thinking of all replies. `reply` holds an assistant message's written form."""
    text = f"{START}system\n{system}{tools}{END}\n" if system or tools else ""
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" and strips:
            content = re.sub(r"<think>.*?</think>", "", content, flags=re.DOTALL)
        text += f"{START}{message['role']}\n{content}{END}\n"
    return encode(text + (f"{START}assistant\n" if open_ else ""))


class ToyReader:
    """Reads replies as `say` writes them. Counts what it decodes."""

    ends = frozenset(pieces(END, OTHER_END))

    def __init__(self) -> None:
        self.decoded = 0
        self.parsed = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return "".join(PIECES[token] for token in ids)

    def parse(self, text: str, ids: Sequence[int], tools: Mapping[str, Any]) -> Turn:
        self.parsed += 1
        if "<call>BROKEN" in text:
            raise ValueError("the parser is not made for this")
        thinking = re.match(r"\s*<think>(.*?)</think>", text, re.DOTALL)
        rest = text[thinking.end() :] if thinking else text
        calls = tuple((name, arguments) for name, arguments in re.findall(r"<call>(\S+) (.*?)</call>", rest, re.DOTALL))
        return Turn(thinking.group(1) if thinking else "", rest.partition("<call>")[0], calls)
