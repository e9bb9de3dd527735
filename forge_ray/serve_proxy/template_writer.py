"""What a chat template writes for a model's replies: the text that the model, trained on it, would sample.

The audit of a template (`template_audit`) lets a scripted policy say these texts. Needs a tokenizer, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "cwd": {"type": "string"}},
            "required": ["command"],
        },
    },
}
THOUGHT = "I weigh this up."
ANSWER = "The answer."


@dataclass
class Format:
    """What the template writes for replies, as text without the end token; None where it cannot."""

    answer: str | None
    call: str | None
    calls: str | None
    """Two calls at once."""
    thought: str | None
    """Reasoning and an answer; None where reasoning is not written, not even that of the last reply."""
    drafted: str | None
    """A tool call drafted within the reasoning, then another that is made."""


def call_of(command: str, number: int = 1) -> dict[str, Any]:
    """A tool call as a template takes it."""
    return {"id": f"call{number}", "type": "function", "function": {"name": "bash", "arguments": {"command": command, "cwd": "/"}}}


class Writer:
    """The chat template, asked for what it writes."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template

    def text(self, messages: list[Message], *, tools: bool = False, opening: bool = False) -> str:
        """The rendered conversation. Raises what the template raises."""
        options = {"chat_template": self._template, "tools": [TOOL] if tools else None}
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening, **options)

    def reply(self, message: Message, *, tools: bool = False) -> str | None:
        """What is written for an assistant message, from the end of the generation prompt to the end token; None where it raises."""
        user = [{"role": "user", "content": "x"}]
        try:
            before = self.text(user, tools=tools, opening=True)
            whole = self.text([*user, message], tools=tools)
        except Exception:  # a template raises whatever it likes
            return None
        written = whole.removeprefix(before)
        if written == whole:
            # The generation prompt says more than the history keeps of it, or the beginning changes from turn to turn.
            opening = before.removeprefix(self.text(user, tools=tools))
            while opening and opening not in whole:
                opening = opening[:-1]
            written = whole.rpartition(opening)[2] if opening else whole
        return written.partition(self._tokenizer.eos_token)[0] if self._tokenizer.eos_token else written

    def format(self, *, thinks: bool) -> Format:
        """What the template writes for each kind of reply; `thinks`: every reply begins with reasoning, where the template writes it."""

        def message(content: str, reasoning: str | None = None, calls: list[dict[str, Any]] | None = None) -> Message:
            extra: Message = {} if reasoning is None else {"reasoning_content": reasoning, "reasoning": reasoning}
            return {"role": "assistant", "content": content, **extra, **({"tool_calls": calls} if calls else {})}

        thought = self.reply(message(ANSWER, THOUGHT))
        thought = thought if thought is not None and THOUGHT in thought else None
        first = THOUGHT if thinks and thought is not None else None
        one = self.reply(message("", first, [call_of("uptime")]), tools=True)
        one = one if one and "uptime" in one else None
        bare = one and self.reply(message("", calls=[call_of("uptime")]), tools=True)
        draft = bare and self.reply(message("", f"Perhaps {call_of_text(bare, 'touch BAD')}", [call_of("uptime")]), tools=True)
        return Format(
            answer=self.reply(message(ANSWER, first)),
            call=one,
            calls=one and self.reply(message("", first, [call_of("uptime"), call_of("whoami", 2)]), tools=True),
            thought=thought,
            drafted=draft if thought is not None and draft and "touch BAD" in draft else None,
        )


def call_of_text(written: str, command: str) -> str:
    """A written call with another command."""
    return written.strip().replace("uptime", command)
