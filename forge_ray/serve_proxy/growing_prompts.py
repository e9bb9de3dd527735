"""Token ids of prompts that grow: what a session has tokenised before is not tokenised again.

A harness sends its whole history with every call, and a server that tokenises it anew spends most of a call's time on that. A tokenizer
splits a text at its special tokens before it does anything else, so what stands in front of one is tokenised the same whatever follows.
Invariants:

- The ids are exactly those that the tokenizer gives for the whole text. Reuse ends at a *mark*: a special token that is matched wherever
  its text stands (`marks`), found in the text of an earlier prompt and, as often, in its ids. The rest is tokenised behind the
  mark itself, so that it is no beginning of a text.
- Where anything else could matter (a tokenizer without marks, a text without them), the whole text is tokenised.
- Memory is bounded: a few prompts of each session, all within a budget; those used longest ago go first.

Encoding is the caller's, wherever it likes; everything here belongs to one thread.
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PROMPTS = 4
"""Prompts kept of a session: one for each conversation that goes on at the same time."""
BUDGET = 256 * 2**20
"""Bytes of all prompts kept."""
MARK_BYTES = 80
"""Of what is known of one mark in a prompt, about."""
BLOCK = 4096
"""Characters compared at a time."""

Encode = Callable[[str], list[int]]


def marks(added: Iterable[Any], encode: Encode) -> dict[str, int]:
    """The special tokens (text -> id) of `added` (`tokenizers.AddedToken`s) that are matched wherever their text stands.

    Left out are those that look at what is around them (stripped spaces, single words), are matched after normalisation, or could overlap
    with another added token. `encode`: of a text, without special tokens added; each mark must come back as one id in the middle of a text.
    """
    tokens = [token for token in added if token.content]
    found: dict[str, int] = {}
    for token in tokens:
        text = token.content
        plain = token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        if not plain or any(_overlap(text, other.content) for other in tokens if other is not token) or _borders(text, text):
            continue
        alone, twice, behind = encode(text), encode(f"a{text}{text}b"), encode(f"{text}b")
        if len(alone) == 1 and len(behind) > 1 and twice[-len(behind) - 1 :] == alone + behind and twice.count(alone[0]) == 2:
            found[text] = alone[0]
    return found


def _overlap(one: str, other: str) -> bool:
    return one in other or other in one or _borders(one, other) or _borders(other, one)


def _borders(one: str, other: str) -> bool:
    """Whether an end of `one`, shorter than both, is a beginning of `other`."""
    return any(one.endswith(other[:length]) for length in range(1, min(len(one), len(other))))


@dataclass
class Prompt:
    """A prompt that was tokenised."""

    text: str
    ids: array[int]
    """Ten times smaller than a list, so that many long sessions fit the budget."""
    ends: list[int] = field(default_factory=list)
    """Characters up to and with each mark, rising."""
    counts: list[int] = field(default_factory=list)
    """Ids up to and with each mark."""
    size: int = 0
    """Bytes of its own, about."""


@dataclass
class Plan:
    """How a text is to be tokenised."""

    session: str
    text: str
    rest: str
    """What is to be encoded; after a reused part it begins with the mark that ends that."""
    parent: Prompt | None = None
    cut: int = -1
    """Mark of the parent that the reused part ends with."""


class GrowingPrompts:
    """The prompts of many sessions."""

    def __init__(self, marks: Mapping[str, int], budget: int = BUDGET) -> None:
        self._marks = marks
        self._ids = frozenset(marks.values())
        self._pattern = re.compile("|".join(re.escape(text) for text in marks)) if marks else None
        self._sessions: OrderedDict[str, list[Prompt]] = OrderedDict()
        self._budget, self._used = budget, 0

    @property
    def used(self) -> int:
        """Bytes of the prompts kept, about."""
        return self._used

    def plan(self, session: str, text: str) -> Plan:
        """What of `text` must be encoded."""
        best: tuple[int, Prompt] | None = None
        for prompt in self._sessions.get(session, ()):
            cut = bisect_right(prompt.ends, common(prompt.text, text)) - 1
            if cut >= 0 and (best is None or prompt.ends[cut] > best[1].ends[best[0]]):
                best = cut, prompt
        if best is None:
            return Plan(session, text, text)
        cut, prompt = best
        return Plan(session, text, text[prompt.ends[cut] - self._length(prompt, cut) :], prompt, cut)

    def keep(self, plan: Plan, encoded: list[int]) -> list[int]:
        """The ids of the plan's text, from those of its `rest`; they are kept for the session's next prompt."""
        if self._pattern is None:
            return encoded
        prompt = Prompt(plan.text, array("i", encoded))
        start = 0
        if plan.parent is not None:
            parent, upto = plan.parent, plan.cut + 1
            count = parent.counts[plan.cut]
            prompt.ids = parent.ids[:count] + prompt.ids[1:]
            prompt.ends, prompt.counts = parent.ends[:upto], parent.counts[:upto]
            start = parent.ends[plan.cut]
        self._mark(prompt, start)
        self._store(plan, prompt)
        return encoded if plan.parent is None else prompt.ids.tolist()

    def forget(self, session: str) -> None:
        """Let go of a session's prompts."""
        for prompt in self._sessions.pop(session, ()):
            self._used -= prompt.size

    def _length(self, prompt: Prompt, cut: int) -> int:
        """Characters of the mark itself."""
        return next(len(text) for text in self._marks if prompt.text.endswith(text, 0, prompt.ends[cut]))

    def _mark(self, prompt: Prompt, start: int) -> None:
        """Find the marks from character `start` on: those that text and ids have equally often (what a tokenizer makes of unknown
        characters may look like one)."""
        assert self._pattern is not None
        first = prompt.counts[-1] if prompt.counts else 0
        said = [(match.end(), self._marks[match.group()]) for match in self._pattern.finditer(prompt.text, start)]
        have = [(place + 1, one) for place, one in enumerate(prompt.ids[first:], first) if one in self._ids]
        in_text, in_ids = Counter(one for _, one in said), Counter(one for _, one in have)
        said = [(end, one) for end, one in said if in_text[one] == in_ids[one]]
        have = [(count, one) for count, one in have if in_text[one] == in_ids[one]]
        if [one for _, one in said] == [one for _, one in have]:
            prompt.ends += [end for end, _ in said]
            prompt.counts += [count for count, _ in have]

    def _store(self, plan: Plan, prompt: Prompt) -> None:
        kept = self._sessions.setdefault(plan.session, [])
        self._sessions.move_to_end(plan.session)
        parent = plan.parent
        prompt.size = sys.getsizeof(prompt.text) + prompt.ids.itemsize * len(prompt.ids) + MARK_BYTES * len(prompt.ends)
        # The one that it goes on from has served; where it goes another way early, both may go on.
        if parent is not None and plan.cut * 2 >= len(parent.ends):
            self._drop(kept, parent)
        elif len(kept) >= PROMPTS:
            self._drop(kept, kept[0])
        kept.append(prompt)
        self._used += prompt.size
        while self._used > self._budget and len(self._sessions) > 1:
            self.forget(next(iter(self._sessions)))

    def _drop(self, kept: list[Prompt], prompt: Prompt) -> None:
        for index, one in enumerate(kept):
            if one is prompt:
                del kept[index]
                self._used -= prompt.size
                return


def common(one: str, other: str) -> int:
    """Number of characters that two texts begin with together."""
    length = min(len(one), len(other))
    for start in range(0, length, BLOCK):
        if one[start : start + BLOCK] != other[start : start + BLOCK]:
            end = min(start + BLOCK, length)
            return next((at for at in range(start, end) if one[at] != other[at]), end)
    return length
