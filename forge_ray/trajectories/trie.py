"""A radix trie over token arrays: sequences that begin alike share the nodes of what they share.

Each node holds a run of tokens (a view of an array that was inserted, never a copy) and is reached by one path from the root. A sequence
that was inserted ends at the end of a node, and that node stays its end whatever is inserted later: a node that has to be split keeps its
end and gets a new parent for its first part. So a call's path, from its end to the root, spells what the engine saw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forge_ray.trajectories.trajectory import Trajectory

ROOT = 0


class Trie:
    """Nodes are numbers; `parent`, `tokens` and `end` are by node. The root has no tokens."""

    def __init__(self) -> None:
        self.parent: list[int] = [-1]
        self.tokens: list[np.ndarray] = [np.zeros(0, np.int32)]
        self.end: list[int] = [0]
        """Depth of the end of the node's run: tokens from the root."""
        self._children: list[dict[int, int]] = [{}]

    def begin(self, node: int) -> int:
        """Depth of the first token of the node's run."""
        return self.end[node] - len(self.tokens[node])

    def insert(self, node: int, depth: int, tokens: np.ndarray) -> int:
        """The node at whose end `tokens` end, put behind the first `depth` tokens of the path to `node`."""
        if not 0 <= depth <= self.end[node]:
            raise ValueError(f"a path of {self.end[node]} tokens has no place {depth}")
        while self.begin(node) >= depth and node != ROOT:
            node = self.parent[node]
        used, done = depth - self.begin(node), 0
        while True:
            run = self.tokens[node]
            same = _common(run[used:], tokens[done:])
            used, done = used + same, done + same
            if used < len(run):
                # The tokens end, or leave, within the run.
                node = self._split(node, used)
                return node if done == len(tokens) else self._add(node, tokens[done:])
            if done == len(tokens):
                return node
            child = self._children[node].get(int(tokens[done]))
            if child is None:
                return self._add(node, tokens[done:])
            node, used = child, 0

    def path(self, node: int) -> list[int]:
        """Nodes from below the root to `node`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]

    def spell(self, node: int) -> np.ndarray:
        """The tokens from the root to the end of `node`."""
        return np.concatenate([self.tokens[ROOT], *(self.tokens[one] for one in self.path(node))])

    def depth_first(self, ends: set[int]) -> list[int]:
        """The nodes on the paths to `ends`, without the root, depth first; siblings in the order in which they came."""
        needed = [False] * len(self.parent)
        for node in ends:
            while not needed[node]:
                needed[node] = True
                if node == ROOT:
                    break
                node = self.parent[node]
        order: list[int] = []
        stack = [ROOT]
        while stack:
            node = stack.pop()
            if not needed[node]:
                continue
            if node != ROOT:
                order.append(node)
            stack += reversed(self._children[node].values())
        return order

    def _add(self, parent: int, tokens: np.ndarray) -> int:
        node = self._new(parent, tokens, self.end[parent] + len(tokens))
        self._children[parent][int(tokens[0])] = node
        return node

    def _split(self, node: int, used: int) -> int:
        """A new node with the first `used` tokens of `node`'s run, which becomes its only child."""
        run = self.tokens[node]
        upper = self._new(self.parent[node], run[:used], self.begin(node) + used)
        self._children[self.parent[node]][int(run[0])] = upper
        self._children[upper][int(run[used])] = node
        self.parent[node], self.tokens[node] = upper, run[used:]
        return upper

    def _new(self, parent: int, tokens: np.ndarray, end: int) -> int:
        self.parent.append(parent)
        self.tokens.append(tokens)
        self.end.append(end)
        self._children.append({})
        return len(self.parent) - 1


@dataclass
class Ends:
    """Where the calls of one trajectory end in a trie: nodes by ordinal."""

    prompt: list[int]
    whole: list[int]


def add(trie: Trie, trajectory: Trajectory) -> Ends:
    """Put every call of a trajectory into the trie, trained or not: later prompts may begin with it."""
    count = len(trajectory.calls)
    ends = Ends([ROOT] * count, [ROOT] * count)
    for ordinal in trajectory.lineage():
        call = trajectory.calls[ordinal]
        base = ROOT if call.parent < 0 else ends.whole[call.parent]
        ends.prompt[ordinal] = trie.insert(base, call.shared, call.new)
        ends.whole[ordinal] = trie.insert(ends.prompt[ordinal], call.prompt_tokens, call.ids)
    return ends


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Number of equal tokens at the beginning of both."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    place = int(differ.argmax()) if length else 0
    return place if length and differ[place] else length
