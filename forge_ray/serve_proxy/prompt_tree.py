"""The prompts of a session's recorded calls: a radix tree of what was rendered, and of each call what was used.

*Rendered* is a prompt as the chat template and the tokenizer made it from the request; *used* is what the engine was given, where replies
of earlier calls may stand as they were sampled. The tree is over the rendered prompts, so a new prompt finds every recorded prompt that it
begins with in one pass over its tokens, whatever the number of calls. What was used is held as (parent, shared, tail), the same way as in
the call log: a session takes memory for new tokens only.

Invariant: the path from the root to a node spells exactly the rendered prompt of every call at that node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from forge_ray.serve_proxy.ids import plain
from forge_ray.serve_proxy.turns import Turn

Status = Literal["new", "exact", "spliced", "fork"]
"""How a prompt continues its conversation, see `forge_ray.trajectories.call`."""
NOTHING = np.empty(0, dtype=np.int32)


@dataclass(eq=False, slots=True)
class Recorded:
    """One call, as far as later prompts need it."""

    call: str
    conversation: str
    kind: str
    order: int
    """Rises with every call of the session."""
    rendered: int
    """Tokens of the prompt as rendered."""
    parent: Recorded | None
    shared: int
    tail: np.ndarray
    """int32. The prompt as used is the first `shared` tokens of the parent's prompt as used and sampled ids, then these."""
    media: tuple[str, ...] = ()
    """Digests of the images and the like in the prompt: they are no tokens."""
    continues: Recorded | None = None
    """The call whose reply the prompt continues, token for token as used."""
    ids: np.ndarray = field(default_factory=lambda: NOTHING)
    """int32, sampled; empty until the call has ended."""
    status: str = "open"
    """As in the call log; `dropped`: its events are not in the log."""
    splice: Status = "new"
    reason: str | None = None
    plain: bool = True
    """Used and rendered are the same."""
    stop: int | str | None = None
    """What ended the reply besides an end token: a stop string, which is not in the text that the harness got, or a token id."""
    delivered: bool | None = None
    issued: list[str] = field(default_factory=list)
    """Ids of the reply's tool calls and items. Filled in while the reply goes out."""
    prints: Sequence[int] | None = None
    """Digests of the request's history items; None after a restart."""
    head: tuple[int, int] | None = None
    """Digests of system text and tools."""
    followers: list[Recorded] = field(default_factory=list)
    """Calls that continue this one's reply."""
    turn: tuple[object, Turn | None] | None = None
    """The reply read by the parsers, and for which tools (cached); None where they raised."""
    strings: tuple[str, ...] | None = None
    """String arguments of its tool calls (cached)."""
    home: _Node | None = None
    """Where it is in the tree."""

    def brought_back(self, returned: Collection[str]) -> bool:
        """Whether a request brings back one of its ids (`returned`: in plain form)."""
        return any(plain(name) in returned for name in self.issued)

    @property
    def used(self) -> int:
        """Tokens of the prompt as used."""
        return self.shared + len(self.tail)

    def sequence(self, length: int | None = None) -> np.ndarray:
        """The first `length` tokens (default: all) of the prompt as used and the sampled ids, int32."""
        left = self.used + len(self.ids) if length is None else length
        pieces: list[np.ndarray] = []
        call: Recorded | None = self
        while call is not None and left > 0:
            if left > call.used:
                pieces.append(call.ids[: left - call.used])
            if left > call.shared:
                pieces.append(call.tail[: left - call.shared])
            left, call = min(left, call.shared), call.parent
        return np.concatenate(pieces[::-1]) if pieces else NOTHING


@dataclass(eq=False, slots=True)
class _Node:
    edge: np.ndarray
    depth: int
    """Tokens from the root to here."""
    up: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    calls: list[Recorded] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prompt goes along the tree."""

    matched: int
    """Leading tokens that some recorded prompt has in common with it."""
    path: list[_Node]
    """Nodes whose whole prompt it begins with, from the root."""
    below: _Node
    """Every prompt that has the matched tokens is of a call in this subtree."""

    def prefixes(self) -> Iterator[list[Recorded]]:
        """Calls whose rendered prompt the prompt begins with, the longest first; calls with the same prompt together."""
        return (node.calls for node in reversed(self.path) if node.calls)

    def beyond(self, reach: int) -> list[tuple[np.ndarray, list[Recorded]]]:
        """Calls whose rendered prompt has at most `reach` more tokens than match: (those tokens, calls), the longest first."""
        found: list[tuple[np.ndarray, list[Recorded]]] = []
        start = self.below
        work = [(start, start.edge[len(start.edge) - (start.depth - self.matched) :])]
        while work:
            node, rest = work.pop()
            if len(rest) > reach:
                continue
            if node.calls and len(rest):
                found.append((rest, node.calls))
            work += [
                (child, np.concatenate([rest, child.edge])) for child in node.children.values() if len(rest) + len(child.edge) <= reach
            ]
        return sorted(found, key=lambda item: -len(item[0]))

    def newest(self) -> Recorded | None:
        """The newest call that has all the matched tokens."""
        best: Recorded | None = None
        work = [self.below]
        while work:
            node = work.pop()
            for call in node.calls:
                if best is None or call.order > best.order:
                    best = call
            work += node.children.values()
        return best


class PromptTree:
    """The recorded calls of one session."""

    def __init__(self) -> None:
        self._root = _Node(NOTHING, 0)
        self.calls: dict[str, Recorded] = {}
        self.gone = 0
        """Calls that were taken out."""

    def match(self, prompt: np.ndarray) -> Match:
        """Walk along `prompt` (int32). O(len(prompt))."""
        node, at, path = self._root, 0, [self._root]
        while at < len(prompt) and (child := node.children.get(int(prompt[at]))) is not None:
            same = common_prefix(child.edge, prompt[at : at + len(child.edge)])
            at += same
            if same < len(child.edge):
                return Match(at, path, child)
            node = child
            path.append(node)
        return Match(at, path, node)

    def add(self, prompt: np.ndarray, call: Recorded) -> None:
        """Enter a call under its rendered prompt."""
        self.calls[call.call] = call
        node, at = self._root, 0
        while at < len(prompt):
            child = node.children.get(int(prompt[at]))
            if child is None:
                child = _Node(prompt[at:].copy(), len(prompt), node)
                node.children[int(prompt[at])] = child
                node = child
                break
            same = common_prefix(child.edge, prompt[at : at + len(child.edge)])
            if same < len(child.edge):
                middle = _Node(child.edge[:same].copy(), at + same, node, {int(child.edge[same]): child})
                node.children[int(prompt[at])] = middle
                child.edge, child.up = child.edge[same:].copy(), middle
                child = middle
            node, at = child, at + same
        node.calls.append(call)
        call.home = node

    def rendered(self, call: Recorded) -> np.ndarray:
        """The prompt of an entered call as rendered, int32."""
        pieces, node = [], call.home
        while node is not None:
            pieces.append(node.edge)
            node = node.up
        return np.concatenate(pieces[::-1])

    def remove(self, call: str) -> None:
        """Take a call out: no prompt finds it any more."""
        found = self.calls.pop(call, None)
        if found is None:
            return
        self.gone += 1
        found.status = "dropped"
        if found.home is not None:
            found.home.calls.remove(found)
        if found.continues is not None:
            found.continues.followers.remove(found)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-d integer arrays."""
    n = min(len(a), len(b))
    equal = a[:n] == b[:n]
    return n if equal.all() else int(equal.argmin())
