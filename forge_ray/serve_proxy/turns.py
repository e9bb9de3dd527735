"""A reply as its reader takes it: reasoning, text, tool calls; and whether two replies say the same.

A chat template writes a reply of the history again from what the harness kept of it, so the tokens may be others than those that were
sampled. Both are read back by the parsers that the server itself uses (`TurnReader`), and compared by meaning: whitespace at the ends of
reasoning and text does not count, tool arguments are compared as JSON. Pure; knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from forge_ray.serve_proxy import canonical_json
from forge_ray.serve_proxy.canonical_json import Schema

Part = Literal["reasoning", "text", "calls", "name", "arguments"]
SHOWN = 24
"""Characters of a text that a reason shows."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments (a text of JSON, or whatever the model wrote) of each call, in order."""

    def plus(self, other: Turn) -> Turn:
        """Both as one reply: some templates write a reply as several messages."""
        return Turn(_join(self.reasoning, other.reasoning), _join(self.text, other.text), self.calls + other.calls)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two replies part."""

    part: Part
    words: str
    """One phrase."""
    missing: bool = False
    """The second has nothing of that part."""


class TurnReader(Protocol):
    """What splice needs of a tokenizer and of the server's parsers."""

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a turn."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included, nothing cleaned up."""
        ...

    def parse(self, text: str, ids: Sequence[int], tools: Mapping[str, Schema]) -> Turn:
        """Read a reply's text (`ids`: its tokens, without the end). May raise whatever the model's parsers raise."""
        ...


def difference(before: Turn, after: Turn, tools: Mapping[str, Schema]) -> Difference | None:
    """Where `after` says something else than `before`; None if nowhere. `tools`: schema of the arguments by the tool's name."""
    texts: tuple[tuple[Part, str, str], ...] = (
        ("reasoning", before.reasoning.strip(), after.reasoning.strip()),
        ("text", before.text.strip(), after.text.strip()),
    )
    for part, one, other in texts:
        if one != other:
            return Difference(part, parting(one, other), missing=not other)
    if len(before.calls) != len(after.calls):
        return Difference("calls", f"{len(before.calls)} tool calls became {len(after.calls)}", missing=not after.calls)
    for number, ((name, given), (other_name, kept)) in enumerate(zip(before.calls, after.calls, strict=True), start=1):
        if name != other_name:
            return Difference("name", f"tool call {number}: {name!r} became {other_name!r}")
        if found := canonical_json.difference(given, kept, tools.get(name)):
            return Difference("arguments", f"arguments of tool call {number} ({name}): {found}")
    return None


def parting(one: str, other: str) -> str:
    """The place where two texts part, in words: `at character 12: 'abc' became 'abd'`."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"at character {at}: {shown(one[at:])} became {shown(other[at:])}"


def shown(text: str) -> str:
    """The beginning of a text, quoted, on one line."""
    if not text:
        return "nothing"
    return repr(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


def _join(one: str, other: str) -> str:
    return f"{one.rstrip()}\n{other.lstrip()}" if one.strip() and other.strip() else one + other
