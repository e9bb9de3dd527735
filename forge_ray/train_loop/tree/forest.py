"""The tries of a batch, end to end in flat arrays, cut down to what is trained.

A trie's tokens lie depth first, so one integer per token says what sees it: key j is visible to query i iff `j <= i < sub_end[j]`. Several
tries are one forest: their roots see nothing of each other. Invariants:

- `position[i]` is the number of tokens visible to i without itself; the tokens visible to i, in order, are the sequence the engine saw.
- Everything that is kept predicts an emission or stands above one: `select` drops the rest, so a trie that is cut down to some of its
  rollouts costs what these cost.
- Emissions are what is counted: two rollouts that sampled the same token at the same place are two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from forge_ray.errors import ForgeRayError
from forge_ray.train_loop.losses import Total
from forge_ray.trajectories.split import partition
from forge_ray.trajectories.tree_rows import FlatTrie, trees
from forge_ray.trajectories.tree_schema import PER_EMISSION, PER_TOKEN, TREE_SCHEMA

_KINDS = {
    field.name: np.float32 if field.type.value_type == pa.float32() else np.int64
    for field in TREE_SCHEMA
    if field.name in (*PER_TOKEN, *PER_EMISSION)
}


class ForestError(ForgeRayError):
    """Arrays that are no forest of tries."""


@dataclass(frozen=True)
class Forest(FlatTrie):
    """The tries of a batch, one after another: whole numbers are int64, every weight is above 0. U tokens, E emissions, R rollouts."""

    @property
    def emissions(self) -> int:
        return len(self.at)

    @property
    def sequence(self) -> np.ndarray:
        """int64, (E,): number of the (rollout, call) that the emission belongs to."""
        return np.unique(np.stack([self.owner, self.call], 1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def total(self) -> Total:
        """What is trained here; add that of other ranks, which hold other rollouts."""
        return Total(self.emissions, len(np.unique(self.owner)), int(self.sequence.max(initial=-1)) + 1)

    def describe(self, emission: int) -> str:
        """An emission, for a person."""
        return f"{self.rollouts[self.owner[emission]]}, call {self.call[emission]}, token {self.position[self.at[emission]] + 1}"

    def shares(self, parts: int, seed: int | str | None = None) -> list[np.ndarray]:
        """The emissions (bool, (E,)) of `parts` sets of whole rollouts, balanced by trained tokens, drawn by `seed`; some may be empty."""
        owners, sizes = np.unique(self.owner, return_counts=True)
        return [np.isin(self.owner, owners[share]) for share in partition(sizes.tolist(), parts, seed=seed)]


def forest(table: pa.Table) -> Forest:
    """Everything that is in the loss of a table of `TREE_SCHEMA`, whose rows name different rollouts. Raises `ForestError` for no trie."""
    found = []
    for row, tree in enumerate(trees(table)):
        check(tree.sub_end, tree.position, tree.at, where=f"trie {row}")
        columns = {name: getattr(tree, name).astype(kind, copy=False) for name, kind in _KINDS.items()}
        found.append(Forest(**columns, rollouts=tuple(tree.rollouts)))
    whole = join(found)
    return whole.select(whole.weight > 0)


def join(forests: Sequence[Forest]) -> Forest:
    """Several forests as one; their rollouts are taken to be different ones."""
    shift = {name: np.cumsum([0, *(len(one) for one in forests)]) for name in ("sub_end", "at")}
    shift["owner"] = np.cumsum([0, *(len(one.rollouts) for one in forests)])
    arrays = {
        name: np.concatenate(
            [np.zeros(0, kind), *(getattr(one, name) + (shift[name][n] if name in shift else 0) for n, one in enumerate(forests))],
            dtype=kind,
        )
        for name, kind in _KINDS.items()
    }
    return Forest(**arrays, rollouts=tuple(name for one in forests for name in one.rollouts))


def segments(sub_end: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The radix segments, int64 (S, 3): tokens [start, end) that every sequence takes together, and the end of their subtree."""
    breaks = np.ones(len(sub_end), bool)
    breaks[1:] = (position[1:] != position[:-1] + 1) | (sub_end[1:] != sub_end[:-1])
    starts = np.flatnonzero(breaks)
    return np.stack([starts, np.append(starts[1:], len(sub_end))[: len(starts)], sub_end[starts]], 1).astype(np.int64)


def check(sub_end: np.ndarray, position: np.ndarray, at: np.ndarray, where: str = "trie") -> None:
    """Raise `ForestError` unless subtrees nest, positions are depths and every emission has a predictor."""
    count = len(sub_end)
    if len(at) and not 0 <= at.min() <= at.max() < count:
        raise ForestError(f"{where}: an emission has no token that predicts it")
    if len(position) != count:
        raise ForestError(f"{where}: {count} ends of subtrees and {len(position)} positions")
    path: list[tuple[int, int]] = []  # (end of subtree, tokens down to here), of the open segments
    for start, end, until in segments(sub_end, position).tolist():
        while path and path[-1][0] <= start:
            path.pop()
        if until < end or until > (path[-1][0] if path else count):
            raise ForestError(f"{where}: the subtree of token {start} ends at {until}, which does not nest")
        above = path[-1][1] if path else 0
        if position[start] != above:
            raise ForestError(f"{where}: token {start} has position {position[start]} and {above} tokens above it")
        path.append((until, above + end - start))
