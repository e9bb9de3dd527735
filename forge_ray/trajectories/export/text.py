"""A call's tokens as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_ray.trajectories.call import Call, lived_through
from forge_ray.trajectories.export.marks import Marks, Part, ends, messages
from forge_ray.trajectories.export.template import Message, Render, TemplateError


@dataclass(frozen=True)
class Text:
    """The policy's tokenizer and template."""

    decode: Callable[[Sequence[int]], str]
    """Token ids -> text, special tokens written out."""
    render: Render
    marks: Marks

    @classmethod
    def of(cls, decode: Callable[[Sequence[int]], str], render: Render) -> Text:
        """Raises `TemplateError`."""
        return cls(decode, render, Marks.of(render))

    def conversation(self, call: Call) -> tuple[list[Message], bool]:
        """The messages of prompt and reply, and whether the template makes of them exactly the text that the engine saw."""
        text = self.decode([*call.prompt_ids, *call.ids])
        found = messages(self.marks.cut(text)[1])
        try:
            return found, self.render(found).startswith(text)
        except TemplateError:
            return found, False

    def prompt(self, call: Call, before: Call | None) -> list[Part]:
        """The messages of the prompt: those after `before`'s reply where the prompt goes on from all of it, else all. An open last one that
        holds nothing is the beginning of the reply, and left out."""
        if before is not None and goes_on(call, before):
            parts = self.marks.cut(self.decode(call.prompt_ids[call.shared :]), "assistant")[1][1:]
        else:
            parts = self.marks.cut(self.decode(call.prompt_ids))[1]
        return parts[:-1] if parts and parts[-1].role == "assistant" and not parts[-1].content.strip() else parts

    def reply(self, call: Call) -> str:
        """The text of the sampled tokens, without the mark that ends a message."""
        text = self.decode(call.ids)
        for end in ends(self.marks.close["assistant"]):
            if text.endswith(end):
                return text[: -len(end)]
        return text


def goes_on(call: Call, before: Call) -> bool:
    """Whether the call's prompt begins with all that `before` was given and sampled."""
    return call.parent == before.id and call.shared == len(before.prompt_ids) + len(before.ids)


def usable(call: Call) -> bool:
    """Whether the call has a whole reply that the harness went on from, with a token in it."""
    return lived_through(call) and bool(call.ids)


def leaves(calls: Sequence[Call]) -> list[Call]:
    """The usable calls that no other usable one goes on from: with them, every message of the rollout is told once where histories were not
    rewritten."""
    known: Mapping[str, Call] = {call.id: call for call in calls}
    good = [call for call in calls if usable(call)]
    inner = {call.parent for call in good if call.parent in known and goes_on(call, known[call.parent])}
    return [call for call in good if call.id not in inner]
