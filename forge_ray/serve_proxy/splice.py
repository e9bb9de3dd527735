"""Splice: put the tokens that were sampled back where a reply of the history was rendered anew.

A prompt is rendered from what the harness kept, so a reply may come back in other tokens than were sampled although it says the same:
keys of tool arguments reordered, whitespace trimmed, pieces merged by the tokenizer. `continuation` finds the recorded call that a new
prompt goes on from and says how:

- exact: behind the call's prompt as rendered come the sampled ids, one for one;
- spliced: there comes a turn that says the same (`turns.difference`); the sampled ids stand in its place;
- neither: the prompt stays as rendered, from the last common call on, and the reason is told. It is what a deployed model would see.

So a prompt as used is that of the parent, its sampled ids, and a tail that nobody sampled. A token that is trained was always sampled, and
its context is token for token what it was sampled in. Pure: no engine; decoding and parsing come from a `TurnReader`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from forge_ray.serve_proxy.canonical_json import Schema
from forge_ray.serve_proxy.prompt_tree import Match, PromptTree, Recorded, Status
from forge_ray.serve_proxy.turns import Difference, Turn, TurnReader, difference, parting

REACH = 8
"""Tokens at the end of a recorded prompt that may be rendered otherwise once a reply follows: a line end merges with the reply's first."""
MESSAGES = 16
"""Messages that one reply may be rendered as."""

__all__ = ["REACH", "Continuation", "Miss", "Request", "Status", "continuation", "parsed", "sampled_text"]


@dataclass(frozen=True, slots=True)
class Request:
    """What the splice of one prompt may look at besides tokens."""

    returned: Collection[str] = ()
    """Ids that the request brings back, in plain form."""
    media: tuple[str, ...] = ()
    schemas: Callable[[], Mapping[str, Schema]] = dict
    """The declared tools; asked for only when arguments are compared."""
    tools: object = 0
    """What identifies the declared tools."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A recorded call whose prompt the new one has, but whose reply it has not."""

    call: Recorded
    difference: Difference | None
    words: str


@dataclass(slots=True)
class Continuation:
    """How a prompt goes on from the recorded ones."""

    match: Match
    parent: Recorded | None = None
    """Its prompt as used begins the new prompt as used; with `continues`, its sampled ids follow."""
    continues: Literal["exact", "spliced"] | None = None
    rest: int = 0
    """Place in the rendered prompt from which on it is used as it is."""
    rerendered: list[int] | None = None
    """Rendered ids that the sampled ones took the place of."""
    overlap: int = 0
    """Tokens at the end of the parent's rendered prompt that are not in the new one, as they merged with the reply's first."""
    misses: list[Miss] = field(default_factory=list)


def continuation(tree: PromptTree, prompt: np.ndarray, request: Request, reader: TurnReader | None) -> Continuation:
    """The recorded call that `prompt` (as rendered, int32) goes on from. Changes nothing but caches of parsed replies."""
    match = tree.match(prompt)
    found = Continuation(match)
    if reader is not None and not request.media:
        for ending, calls in match.beyond(REACH):
            if _merged(reader, prompt, match.matched, ending):
                for call in _ranked(calls, request):
                    if _take(found, _compare(call, prompt, match.matched, ending, request, reader)):
                        return found
    anchor: Recorded | None = None
    for calls in match.prefixes():
        if calls[0].rendered == len(prompt):
            continue  # the same request again: nobody's reply is in it
        ranked = _ranked(calls, request)
        for call in ranked:
            if _take(found, _exact(call, prompt, request) or _compare(call, prompt, call.rendered, (), request, reader)):
                return found
        anchor = anchor or next((call for call in ranked if _fits(call, request)), None)
        if any(len(call.ids) for call in ranked):
            break
    if anchor is not None:
        found.parent, found.rest = anchor, anchor.rendered
    return found


def _take(found: Continuation, result: _Splice | Miss) -> bool:
    if isinstance(result, Miss):
        found.misses.append(result)
        return False
    found.parent, found.rest, found.rerendered, found.overlap = result.call, result.rest, result.rerendered, result.overlap
    found.continues = "exact" if result.rerendered is None else "spliced"
    return True


@dataclass(frozen=True, slots=True)
class _Splice:
    call: Recorded
    rest: int
    rerendered: list[int] | None = None
    overlap: int = 0


def _ranked(calls: Sequence[Recorded], request: Request) -> list[Recorded]:
    """Calls with one and the same prompt: first the one whose ids come back, then what reached the harness last."""

    def rank(call: Recorded) -> tuple[bool, bool, int]:
        return call.brought_back(request.returned), call.delivered is not False, call.order

    return sorted(calls, key=rank, reverse=True)


def _exact(call: Recorded, prompt: np.ndarray, request: Request) -> _Splice | None:
    end = call.rendered + len(call.ids)
    if not len(call.ids) or end > len(prompt) or not _fits(call, request) or call.media != request.media[: len(call.media)]:
        return None
    return _Splice(call, end) if np.array_equal(prompt[call.rendered : end], call.ids) else None


def _fits(call: Recorded, request: Request) -> bool:
    """Whether the prompt may go on from what was used for `call`: images have their places in the prompt as it was rendered."""
    return call.plain or not request.media


def _merged(reader: TurnReader, prompt: np.ndarray, at: int, ending: np.ndarray) -> bool:
    """Whether the recorded prompt's `ending` is there in `prompt` from `at` on, as text."""
    before = prompt[max(at - 1, 0) : at].tolist()
    there = reader.decode(before + prompt[at : at + 2 * REACH].tolist())
    return there.startswith(reader.decode(before + ending.tolist()))


def _compare(
    call: Recorded, prompt: np.ndarray, at: int, ending: Sequence[int] | np.ndarray, request: Request, reader: TurnReader | None
) -> _Splice | Miss:
    """Compare the turn that `prompt` has from `at` on with what `call` sampled; `ending` are the tokens of the call's prompt from there."""
    if not len(call.ids):
        return Miss(call, None, "it was not answered" if call.status != "open" else "it still runs")
    if call.media or request.media:
        return Miss(call, None, "prompts with images are used as they are rendered")
    if reader is None:
        return Miss(call, None, "its reply comes back in other tokens")
    sampled = sampled_text(call, reader)
    turn = _Rendered(prompt, at, ending, reader)
    if not turn.find():
        return _by_text(call, prompt, turn, sampled, reader)
    ended = int(call.ids[-1]) in reader.ends
    own = _parsed(call, sampled, request, reader)
    first: Miss | None = None
    while True:
        miss = _same(call, sampled, own, turn, request, reader)
        if miss is None:
            cut = turn.end + 1 if ended else turn.end
            return _Splice(call, cut, prompt[at:cut].tolist(), len(ending))
        first = first or miss
        if not turn.extend():
            return first


def _same(call: Recorded, sampled: str, own: Turn | None, turn: _Rendered, request: Request, reader: TurnReader) -> Miss | None:
    texts = [text for text, _ in turn.messages]
    if len(texts) == 1 and texts[0].strip() == sampled.strip():
        return None
    if own is None:
        return Miss(call, Difference("text", parting(sampled, "".join(texts))), "its reply cannot be parsed and comes back as another text")
    try:
        read = Turn()
        for text, ids in turn.messages:
            read = read.plus(reader.parse(text, ids, request.schemas()))
    except Exception as error:  # a model's parser raises whatever it likes; then only the text counts
        return Miss(call, Difference("text", parting(sampled, "".join(texts))), f"the reply as rendered cannot be parsed ({error})")
    found = difference(own, read, request.schemas())
    if found is not None and found.part == "reasoning" and _without_thinking(own, sampled, "".join(texts)):
        found = replace(found, missing=True)
    return None if found is None else Miss(call, found, found.words)


def _without_thinking(own: Turn, sampled: str, rendered: str) -> bool:
    """Whether only what follows the thinking is there: some parsers take a reply without any mark for one that still thinks."""
    left = sampled.strip().removesuffix(rendered.strip())
    return len(left) < len(sampled.strip()) and own.reasoning.strip() in left


def sampled_text(call: Recorded, reader: TurnReader) -> str:
    """The text of a reply as the harness got it: without its end token and from a stop string on."""
    ids = call.ids
    if len(ids) and (int(ids[-1]) in reader.ends or call.stop == int(ids[-1])):
        ids = ids[:-1]
    text = reader.decode(ids.tolist())
    at = text.rfind(call.stop) if isinstance(call.stop, str) else -1
    return text if at < 0 else text[:at]


def parsed(call: Recorded, request: Request, reader: TurnReader) -> Turn | None:
    """A call's reply read by the server's parsers; None where they raise."""
    return _parsed(call, sampled_text(call, reader), request, reader)


def _parsed(call: Recorded, sampled: str, request: Request, reader: TurnReader) -> Turn | None:
    if call.turn is None or call.turn[0] != request.tools:
        try:
            turn = reader.parse(sampled, call.ids.tolist(), request.schemas())
        except Exception:  # see `_same`
            turn = None
        call.turn = (request.tools, turn)
    return call.turn[1]


def _by_text(call: Recorded, prompt: np.ndarray, turn: _Rendered, sampled: str, reader: TurnReader) -> _Splice | Miss:
    """A prompt without end tokens: the reply's text must stand there as it is, and end where a token ends."""
    wanted = turn.lead + sampled
    span = prompt[turn.before : turn.at + 4 * (len(call.ids) + REACH)]
    if not reader.decode(span.tolist()).startswith(wanted):
        there = reader.decode(span.tolist()).removeprefix(turn.lead)[: len(sampled)]
        found = Difference("text", parting(sampled, there))
        return Miss(call, found, found.words)
    if int(call.ids[-1]) in reader.ends:
        return Miss(call, None, "the end token of its reply is not in the prompt")
    low, high = 0, len(span)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(reader.decode(span[:middle].tolist())) < len(wanted) else (low, middle)
    if reader.decode(span[:low].tolist()) != wanted:
        return Miss(call, None, "the end of its reply is one token with what follows")
    cut = turn.before + low
    return _Splice(call, cut, prompt[turn.at : cut].tolist(), turn.overlap)


class _Rendered:
    """The turn that a prompt has where a recorded reply should be: one message, or several if the template makes several of it."""

    def __init__(self, prompt: np.ndarray, at: int, ending: Sequence[int] | np.ndarray, reader: TurnReader) -> None:
        self._prompt, self.at, self._ending, self._reader = prompt, at, [int(token) for token in ending], reader
        self.overlap = len(self._ending)
        self.before = at if not self._ending else max(at - 1, 0)
        """Decoding begins here: one token earlier where the recorded prompt's end merged, so that both texts have the same left side."""
        self.lead = reader.decode(prompt[self.before : at].tolist() + self._ending) if self._ending else ""
        self.end = -1
        self.messages: list[tuple[str, list[int]]] = []
        """Text and ids of each message, without the end token."""

    def find(self) -> bool:
        """Find the end of the first message."""
        self.end = self._next_end(self.at)
        if self.end < 0:
            return False
        text = self._reader.decode(self._prompt[self.before : self.end].tolist()).removeprefix(self.lead)
        self.messages = [(text, self._prompt[self.at : self.end].tolist())]
        return True

    def extend(self) -> bool:
        """Take in the next message if it is one of the assistant's too."""
        joint = self._joint()
        following = self._next_end(self.end + 1)
        if not joint or following < 0 or len(self.messages) >= MESSAGES:
            return False
        ids = self._prompt[self.end + 1 : following].tolist()
        text = self._reader.decode(ids)
        if not text.startswith(joint):
            return False
        self.messages.append((text.removeprefix(joint), ids))
        self.end = following
        return True

    def _joint(self) -> str:
        """What stands between the end of one message and the beginning of a reply: the end of the recorded prompt."""
        opening = self._prompt[max(0, self.at - 64) : self.at].tolist() + self._ending
        ends = [place for place, token in enumerate(opening) if token in self._reader.ends]
        return self._reader.decode(opening[ends[-1] + 1 :]) if ends else ""

    def _next_end(self, start: int) -> int:
        rest, best = self._prompt[start:], -1
        for token in self._reader.ends:
            places = np.flatnonzero(rest == token)
            if len(places) and (best < 0 or start + int(places[0]) < best):
                best = start + int(places[0])
        return best
