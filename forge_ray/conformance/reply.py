"""What the model says in one turn of a script, and its one spelling as text.

A script's `say` is what a policy would sample, in Hermes form: `<think>…</think>`, text, `<tool_call>` blocks. The scripted engine turns it
into tokens; the upstream server reads it back into its parts. Arguments are JSON text and stay as they are written, byte for byte. A turn
without reasoning begins with an empty block, as those of thinking models do: their parsers take a text without one for reasoning.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_OPEN, _CLOSE = "\n<tool_call>\n", "\n</tool_call>"
_CALL = re.compile(re.escape(_OPEN) + r"(.*?)" + re.escape(_CLOSE), re.DOTALL)
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ARGUMENTS = ', "arguments": '


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is JSON text as it is sampled."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """One turn of the model."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    def say(self) -> str:
        """The turn as sampled text."""
        blocks = (f'{_OPEN}{{"name": {json.dumps(c.name)}{_ARGUMENTS}{c.arguments}}}{_CLOSE}' for c in self.calls)
        return f"<think>{self.reasoning}</think>{self.text}" + "".join(blocks)


def read(say: str) -> Reply:
    """`say`'s inverse."""
    thought = _THOUGHT.match(say)
    rest = say[thought.end() :] if thought else say
    calls = []
    for block in _CALL.findall(rest):
        name, end = json.JSONDecoder().raw_decode(block, len('{"name": '))
        calls.append(ToolCall(name, block[end + len(_ARGUMENTS) : -1]))
    return Reply(rest.partition(_OPEN)[0], tuple(calls), thought.group(1) if thought else "")
