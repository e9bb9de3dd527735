"""Conversations, kinds and parents of a session's calls: which calls belong together, and who started whom.

A harness runs several conversations in one session: its agent's, those of sub-agents, a title, a summary. Headers tell some of it
(`kinds.classify`) and win; the rest is found in the histories. A request belongs to a known conversation if, in this order,

1. its headers name it; 2. its prompt continues a call of it, token for token; 3. it has the conversation's system text, tools and first
user item; 4. it brings back ids that calls of it issued; 5. it has the first user item and a reply in common with a call of it, or all
items of one (the system text or the tools were edited); 6. as rendered it begins with a prompt of it (only for a
request without a history, or a call from before a restart); 7. nothing of the conversation has reached the harness and the request has the
same system text and tools (a retry that rewrites the user message).

Any other request starts a conversation. That is a sub-agent's if its first user text holds a string argument of a tool call that the
session made before; a side call (aux) if it declares no tools and has another system text than those that do; else the agent's. A
summary is known by a history without tools, or afterwards: its whole answer stands in the first user text of a conversation that begins, or
begins again, with the same system text, or (a side call's) among a later request's replies. What is seen afterwards corrects earlier calls.

Pure: no clock, no engine. `judge` changes nothing, `enter` takes its verdict in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from forge_ray.serve_proxy.canonical_json import load
from forge_ray.serve_proxy.history import History, text_of
from forge_ray.serve_proxy.identity import Kind
from forge_ray.serve_proxy.prompt_tree import Recorded
from forge_ray.serve_proxy.turns import Turn

ARGUMENT = 8
"""Characters that a string argument must have to start a sub-agent."""
SUMMARY = 40
"""Characters that an answer must have to be a summary."""
_INNER = re.compile(r"<(\w+)>(.*?)</\1>", re.DOTALL)

ReadTurn = Callable[[Recorded], Turn | None]
"""The reply of an ended call; None where it cannot be read."""


@dataclass(eq=False)
class Conversation:
    """Calls that belong together."""

    id: str
    kind: Kind | None = None
    """agent or subagent; None while only side calls and summaries were seen."""
    by_header: bool = False
    """Its first call's kind was told by a header."""
    head: tuple[int, int] | None = None
    """Digests of system text and tools; None after a restart, until a request of it comes."""
    opening: int | None = None
    """Digest of the first user item."""
    calls: list[Recorded] = field(default_factory=list)
    replied: bool = False
    """A request of it carried a reply."""

    @property
    def last(self) -> Recorded | None:
        """The newest call that sampled something, else the newest."""
        return next((call for call in reversed(self.calls) if len(call.ids)), self.calls[-1] if self.calls else None)


@dataclass(frozen=True)
class Verdict:
    """Where a request belongs."""

    conversation: str | None
    """None: it starts one, which is named after its call."""
    kind: Kind
    by_header: bool = False
    spawned_by: str | None = None
    corrections: tuple[tuple[str, Kind], ...] = ()
    """Earlier calls whose kind is another than was thought."""
    near: Conversation | None = None
    """Of a new conversation: one with the same system text and tools."""


class Conversations:
    """Those of one session."""

    def __init__(self) -> None:
        self.known: dict[str, Conversation] = {}

    def judge(
        self,
        history: History | None,
        kind: Kind,
        hint: str | None,
        *,
        continues: Recorded | None,
        rooted: Recorded | None,
        read: ReadTurn,
    ) -> Verdict:
        """`kind` and `hint`: what the headers tell (`agent`: nothing). `continues`: the call whose reply the prompt goes on from; `rooted`:
        the call whose prompt it begins with."""
        by_header = kind != "agent"
        if hint is not None and hint not in self.known:
            found = None
        else:
            found = self.known[hint] if hint is not None else self._find(history, continues, rooted)
        if hint is None and found is not None and _beside(found) != (by_header and kind == "aux"):
            found = None  # a side call is no turn of the conversation that it is about
        if found is None:
            return self._new(history, kind, hint, read)
        if by_header:
            return Verdict(found.id, kind, True)
        kind = found.kind or "agent"
        if history is not None and not history.tools:
            if history.carries_replies and found.head is not None and found.head[1]:
                kind = "compaction"
            elif found.kind is None and not found.by_header and all(call.kind == "aux" for call in found.calls):
                kind = "aux"
        late: tuple[tuple[str, Kind], ...] = (*self._late_side_calls(history, kind), *self._restated(history, read))
        if history is not None and continues is None and not history.carries_replies:
            # It began again under its first user item, with a summary behind that.
            summary = self._summary(history, history.opening_text(), read)
            late = late if summary is None else (*late, (summary[1].call, "compaction"))
        return Verdict(found.id, kind, corrections=late)

    def enter(self, verdict: Verdict, history: History | None, call: Recorded) -> None:
        """Take in a call under `call.conversation` (the verdict's, or a new one)."""
        found = self.known.get(call.conversation)
        if found is None:
            found = self.known[call.conversation] = Conversation(call.conversation, by_header=verdict.by_header)
        main = verdict.kind in ("agent", "subagent")
        if history is not None:
            # A title is asked for under the same conversation id before the conversation has begun.
            if found.head is None or (main and found.kind is None):
                found.head, found.opening = history.head, history.opening
            found.replied = found.replied or history.carries_replies
        if main and found.kind is None:
            found.kind = verdict.kind
        found.calls.append(call)
        for name, kind in verdict.corrections:
            for conversation in self.known.values():
                for earlier in conversation.calls:
                    if earlier.call == name:
                        earlier.kind = kind
                        if conversation.calls == [earlier]:
                            conversation.kind = None

    def restored(self, call: Recorded) -> None:
        """Take in a call of the log."""
        found = self.known.get(call.conversation)
        if found is None:
            found = self.known[call.conversation] = Conversation(call.conversation)
        if found.kind is None and call.kind in ("agent", "subagent"):
            found.kind = call.kind
        found.calls.append(call)

    def forget(self, call: Recorded) -> None:
        """The call is not in the log."""
        found = self.known.get(call.conversation)
        if found is not None and call in found.calls:
            found.calls.remove(call)
            if not found.calls:
                del self.known[call.conversation]

    # ---- known or new

    def _find(self, history: History | None, continues: Recorded | None, rooted: Recorded | None) -> Conversation | None:
        if continues is not None:
            return self.known.get(continues.conversation)
        newest = sorted(self.known.values(), key=lambda found: found.calls[-1].order, reverse=True)
        if history is None:
            return self.known.get(rooted.conversation) if rooted is not None else None
        for found in newest:
            if found.head == history.head and found.opening == history.opening:
                return found
        if history.returned:
            for found in newest:
                if any(call.brought_back(history.returned) for call in found.calls):
                    return found
        for found in newest:
            if found.opening == history.opening is not None and self._shares(found, history):
                return found
        if rooted is not None and rooted.head is None:
            return self.known.get(rooted.conversation)
        for found in newest:
            begun = history.carries_replies or found.replied
            if found.head == history.head and not begun and all(call.delivered is False for call in found.calls):
                return found
        return None

    @staticmethod
    def _shares(found: Conversation, history: History) -> bool:
        """A reply in common, or all items of a call (one with the same tools, if the request carries no reply)."""
        replies = {value for role, value in zip(history.roles, history.prints, strict=True) if role == "assistant"}
        for call in reversed(found.calls):
            if call.prints is None:
                continue
            if not replies.isdisjoint(call.prints):
                return True
            alike = history.carries_replies or (call.head is not None and call.head[1] == history.tools)
            if alike and list(call.prints) == history.prints[: len(call.prints)]:
                return True
        return False

    def _new(self, history: History | None, kind: Kind, hint: str | None, read: ReadTurn) -> Verdict:
        by_header = kind != "agent"
        if history is None:
            return Verdict(hint, kind, by_header)
        near = next((found for found in self.known.values() if found.head == history.head), None)
        text = history.opening_text()
        if kind == "subagent":
            return Verdict(hint, kind, True, spawned_by=self._spawner(text, read))
        late = (*self._late_side_calls(history, kind), *self._restated(history, read))
        if by_header or hint is not None:
            return Verdict(hint, kind, by_header, corrections=late)
        summary = self._summary(history, text, read)
        if summary is not None:
            before, call = summary
            return Verdict(None, before.kind or "agent", corrections=(*late, (call.call, "compaction")))
        spawner = self._spawner(text, read)
        if spawner is not None:
            return Verdict(None, "subagent", spawned_by=spawner, corrections=late)
        if not history.tools and not history.carries_replies:
            heads = [found.head for found in self.known.values() if found.head is not None and found.head[1]]
            if heads and all(system != history.system for system, _ in heads):
                return Verdict(None, "aux", near=near)
        return Verdict(None, "agent", corrections=late, near=near)

    # ---- who started it

    def _calls(self) -> Iterator[tuple[Conversation, Recorded]]:
        """Every answered call, the newest first."""
        pairs = [(found, call) for found in self.known.values() for call in found.calls if len(call.ids)]
        return iter(sorted(pairs, key=lambda pair: pair[1].order, reverse=True))

    def _spawner(self, text: str, read: ReadTurn) -> str | None:
        """The call one of whose tool calls has an argument that stands in `text`; the longest argument wins, then the newest call."""
        best, caller = "", None
        for _, call in self._calls():
            if call.strings is None:
                turn = read(call)
                call.strings = tuple(_strings(turn)) if turn is not None else ()
            for value in call.strings:
                if len(value) > len(best) and value in text and _like_a_prompt(value, text):
                    best, caller = value, call.call
        return caller

    def _summary(self, history: History, text: str, read: ReadTurn) -> tuple[Conversation, Recorded] | None:
        """The call whose whole answer stands in the new conversation's first user text."""
        for found, call in self._calls():
            if found.head is not None and found.head[0] != history.system and call.kind != "compaction":
                continue
            turn = read(call)
            if turn is None or turn.calls:
                continue
            if any(part in text for part in _summaries(turn)):
                return found, call
        return None

    def _restated(self, history: History | None, read: ReadTurn) -> tuple[tuple[str, Kind], ...]:
        """Side calls whose answer an agent's request holds as a reply of its own: summaries of a history that was sent as one text."""
        if history is None or not history.tools or not history.carries_replies:
            return ()
        aside = [call for _, call in self._calls() if call.kind == "aux"]
        if not aside:
            return ()
        replies = [text_of(item.get("content")) for item in history.items if isinstance(item, dict) and item.get("role") == "assistant"]
        turns = [(call, read(call)) for call in aside]
        return tuple(
            (call.call, "compaction")
            for call, turn in turns
            if turn is not None and not turn.calls and any(part in text for part in _summaries(turn) for text in replies)
        )

    # ---- side calls that came first

    def _late_side_calls(self, history: History | None, kind: str) -> tuple[tuple[str, Kind], ...]:
        """Calls before the first one with tools that turn out to be side calls."""
        if history is None or not history.tools or kind != "agent":
            return ()
        late: list[tuple[str, Kind]] = []
        for found in self.known.values():
            bare = found.head is not None and not found.head[1] and found.head[0] != history.system
            if bare and found.kind == "agent" and not found.by_header and not found.replied:
                late.extend((call.call, "aux") for call in found.calls if call.kind == "agent")
        return tuple(late)


def _beside(found: Conversation) -> bool:
    """Whether it holds nothing but calls that a header, or the model that they ask for, calls side calls."""
    return found.by_header and all(call.kind == "aux" for call in found.calls)


def _summaries(turn: Turn) -> list[str]:
    """What of an answer may be a summary: all of it, or what stands in a tag."""
    said = turn.text.strip()
    parts = (said, *(match.group(2).strip() for match in _INNER.finditer(said)))
    return [part for part in parts if len(part) >= SUMMARY]


def _strings(turn: Turn) -> Iterator[str]:
    """The string arguments of a reply's tool calls that may be a sub-agent's task."""
    for _, arguments in turn.calls:
        work = [load(arguments)[1]]
        while work:
            value = work.pop()
            if isinstance(value, str):
                if len(value.strip()) >= ARGUMENT:
                    yield value.strip()
            elif isinstance(value, dict):
                work += value.values()
            elif isinstance(value, list):
                work += value


def _like_a_prompt(value: str, text: str) -> bool:
    """A path or a word that is mentioned somewhere starts nobody."""
    return not value.isascii() or any(character.isspace() for character in value) or 4 * len(value) >= len(text)
