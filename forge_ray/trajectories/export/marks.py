"""What a chat template puts around a message of each role, found by rendering messages that are known, and texts cut at these marks.

A text is head + (open + content + close) of each message + tail, and joined again it is the same text. The last message may be open (a
reply that was cut) or close early (a reply ends with its end token; what a template adds behind that was never sampled).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_ray.trajectories.export.template import Message, Render, TemplateError

ROLES = ("system", "user", "assistant", "tool")
_PIECE = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\s+|[^<>\[\]\s]+|.")
"""A special token as templates write them, white space, or other text."""
_CALL = [{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}]


@dataclass(frozen=True)
class Part:
    """One message of a text."""

    role: str
    open: str
    content: str
    close: str
    """Empty where the text ends within the message."""


@dataclass(frozen=True)
class Marks:
    """Of one template. `open`: (mark, role), longest first; `close`: by role."""

    open: tuple[tuple[str, str], ...]
    close: Mapping[str, str]

    @classmethod
    def of(cls, render: Render) -> Marks:
        """Raises `TemplateError` where the template takes no user and assistant messages, or puts nothing around them."""
        words = {role: f"Zq{number}Xw{role}Wx{number}qZ" for number, role in enumerate(ROLES)}

        def text(*roles: str, **more: object) -> str:
            return render([{"role": role, "content": words[role]} | (more if role == "assistant" else {}) for role in roles])

        def between(whole: str, first: str, second: str) -> str:
            return whole.partition(words[first])[2].partition(words[second])[0]

        def tail(whole: str, role: str) -> str:
            return whole.rpartition(words[role])[2]

        close = {"user": tail(text("user"), "user"), "assistant": tail(text("user", "assistant"), "assistant")}
        three = text("user", "assistant", "user")
        found = {
            (between(three, "user", "assistant").removeprefix(close["user"]), "assistant"),
            (between(text("user", "assistant"), "user", "assistant").removeprefix(close["user"]), "assistant"),
            (between(three, "assistant", "user").removeprefix(close["assistant"]), "user"),
        }
        user = min((mark for mark, role in found if role == "user"), key=len)
        try:
            whole = text("system", "user")
            if words["system"] in whole and words["user"] in whole:
                close["system"] = between(whole, "system", "user").removesuffix(user)
                found.add((whole.partition(words["system"])[0].removeprefix(_head(text("user"), words["user"], user)), "system"))
        except TemplateError:
            pass  # it takes no system message
        for more in ({}, {"tool_calls": _CALL}):
            try:
                whole = text("user", "assistant", "tool", **more)
            except TemplateError:
                continue  # it takes no tool message, or only one that a call asked for
            if words["tool"] in whole and words["assistant"] in whole:
                close["tool"] = tail(whole, "tool")
                after = between(whole, "assistant", "tool")
                found.add((after[after.rfind(close["assistant"]) + len(close["assistant"]) :], "tool"))
                break
        opens = tuple(sorted(((mark, role) for mark, role in found if mark), key=lambda pair: (-len(pair[0]), pair)))
        if not {"user", "assistant"} <= {role for _, role in opens} or not all(close[role] for role in ("user", "assistant")):
            raise TemplateError("the chat template puts no marks around messages")
        return cls(opens, close)

    def cut(self, text: str, role: str | None = None) -> tuple[str, list[Part]]:
        """The head and the messages of `text`. `role`: the text begins behind what was sampled of a message of this role, where the rest
        of its mark may still come; the first part is then the rest of that message."""
        parts: list[Part] = []
        if role is None:
            first = self._first_open(text)
            if first is None:
                return text, []
            head, at, (mark, role) = text[: first[0]], first[0] + len(first[1][0]), first[1]
        else:
            head, at, mark = "", 0, ""
        end = None if mark else self._rest(text, role)
        while True:
            end = end or self._end(text, at, role)
            if end is None:
                parts.append(Part(role, mark, text[at:], ""))
                return head, parts
            stop, close = end
            parts.append(Part(role, mark, text[at:stop], close))
            at = stop + len(close)
            following = self._open_at(text, at)
            if following is None:
                if at < len(text):  # something between messages: it belongs to what closes the message
                    parts[-1] = Part(role, mark, parts[-1].content, close + text[at:])
                return head, parts
            mark, role = following
            at += len(mark)
            end = None

    def _first_open(self, text: str) -> tuple[int, tuple[str, str]] | None:
        places = [(text.find(mark), -len(mark), (mark, role)) for mark, role in self.open if mark in text]
        if not places:
            return None
        place, _, pair = min(places)
        return place, pair

    def _open_at(self, text: str, at: int) -> tuple[str, str] | None:
        return next((pair for pair in self.open if text.startswith(pair[0], at)), None)

    def _rest(self, text: str, role: str) -> tuple[int, str] | None:
        """What of the role's mark the text begins with, be it nothing, where another message or the end follows it."""
        close = self.close.get(role) or self.close["user"]
        for rest in (close[first:] for first in range(len(close) + 1)):
            if text.startswith(rest) and (len(rest) == len(text) or self._open_at(text, len(rest)) is not None):
                return 0, rest
        return None

    def _end(self, text: str, at: int, role: str) -> tuple[int, str] | None:
        """Where the message that began at `at` ends, and with what: its mark and then another message, the text's end, or (of the last
        message) a beginning of its mark."""
        close = self.close.get(role) or self.close["user"]
        for match in re.compile(re.escape(close)).finditer(text, at):
            if match.end() == len(text) or self._open_at(text, match.end()) is not None:
                return match.start(), close
        for end in ends(close):
            if text.endswith(end) and len(text) - len(end) >= at:
                return len(text) - len(end), end
        return None


def ends(close: str) -> list[str]:
    """What of a closing mark a reply may end with, the longest first: all of it, or without the white space before it, or without what a
    template writes behind the end token (a line's end, the next begin token). Never a part of a token: a reply that was cut behind `x <`
    ends with that."""
    stops = {len(close), *(match.end() for match in _PIECE.finditer(close) if not match[0].isspace())}
    found = {close[first:stop] for first in (0, len(close) - len(close.lstrip())) for stop in stops}
    return sorted(found - {""}, key=len, reverse=True)


def joined(head: str, parts: Sequence[Part]) -> str:
    """The text again."""
    return head + "".join(part.open + part.content + part.close for part in parts)


def messages(parts: Sequence[Part]) -> list[Message]:
    """Role and content of each."""
    return [{"role": part.role, "content": part.content} for part in parts]


def _head(text: str, word: str, mark: str) -> str:
    """What stands before the first message of a conversation that begins with a user's: the begin token, if any."""
    return text.partition(word)[0].removesuffix(mark)
