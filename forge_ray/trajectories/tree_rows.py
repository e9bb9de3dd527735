"""Rows of `TREE_SCHEMA` as arrays, and what is cut out of them.

`restrict` is how a step is cut over ranks, `select` (of a `FlatTrie`, which the learner extends) over the optimizer updates of a step.
Several updates inside one trie would train a shared token under weights that its other emissions no longer see, so each update gets a trie
of its own, of the rollouts that it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.tree_schema import PER_EMISSION, PER_ROLLOUT, TREE_SCHEMA

_NUMPY = {"int32": np.int32, "int64": np.int64, "float": np.float32, "double": np.float64}


@dataclass(frozen=True)
class FlatTrie:
    """The columns that training reads, by name: see `tree_schema`. U tokens depth first, E emissions, R rollouts."""

    ids: np.ndarray
    sub_end: np.ndarray
    position: np.ndarray
    at: np.ndarray
    token: np.ndarray
    logprobs: np.ndarray
    steps: np.ndarray
    temperature: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    owner: np.ndarray
    call: np.ndarray
    rollouts: Sequence[str]

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, emissions: np.ndarray) -> Self:
        """Only these emissions (bool, (E,)), and the tokens that they are predicted from; the rollouts stay.

        A token that no such emission lies below is left out, the last sampled token of a reply with it: it predicts nothing."""
        kept = {name: getattr(self, name)[emissions] for name in PER_EMISSION}
        predicting = np.zeros(len(self) + 1, np.int64)
        predicting[1:] = np.bincount(kept["at"], minlength=len(self)).cumsum()
        needed = predicting[self.sub_end] > predicting[:-1]
        place = np.zeros(len(self) + 1, self.sub_end.dtype)
        place[1:] = needed.cumsum()
        kept |= {"at": place[kept["at"]], "sub_end": place[self.sub_end[needed]]}
        return replace(self, ids=self.ids[needed], position=self.position[needed], **kept)


@dataclass(frozen=True)
class Tree(FlatTrie):
    """One row."""

    groups: list[int]
    tasks: list[str]
    harnesses: list[str]
    rewards: list[float]

    @property
    def trained(self) -> int:
        """Emissions in the loss."""
        return int((self.weight > 0).sum())

    @classmethod
    def in_trie_order(cls, **columns: Any) -> Tree:
        """A tree whose `owner` counts `rollouts` in any order: both are put in trie order, the emissions by owner."""
        owner, at = np.asarray(columns["owner"]), np.asarray(columns["at"])
        first = np.full(len(columns["rollouts"]), np.iinfo(np.int64).max)
        np.minimum.at(first, owner, at)
        order = np.argsort(first, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        columns["owner"] = rank[owner]
        emissions = np.argsort(columns["owner"], kind="stable")
        for name in PER_EMISSION:
            columns[name] = np.asarray(columns[name])[emissions]
        for name in PER_ROLLOUT:
            columns[name] = [columns[name][index] for index in order]
        for field in TREE_SCHEMA:
            if field.name not in PER_ROLLOUT:
                columns[field.name] = columns[field.name].astype(_NUMPY[str(field.type.value_type)], copy=False)
        return cls(**columns)


def restrict(tree: Tree, owners: Sequence[int]) -> Tree:
    """The emissions in the loss (weight above 0) of the rollouts `owners`, rising, and the tokens that they are predicted from (`select`);
    no other rollout."""
    chosen = np.zeros(len(tree.rollouts), np.bool_)
    chosen[list(owners)] = True
    kept = tree.select(chosen[tree.owner] & (tree.weight > 0))
    columns: dict[str, Any] = {name: [getattr(tree, name)[owner] for owner in np.flatnonzero(chosen)] for name in PER_ROLLOUT}
    return replace(kept, owner=(np.cumsum(chosen) - 1)[kept.owner].astype(kept.owner.dtype), **columns)


def trees(table: pa.Table) -> list[Tree]:
    """The rows of a table of `TREE_SCHEMA`."""
    found = []
    columns = {name: table.column(name).combine_chunks() for name in TREE_SCHEMA.names}
    for row in range(table.num_rows):
        values: dict[str, Any] = {}
        for name, column in columns.items():
            value = column[row].values
            values[name] = value.to_pylist() if name in PER_ROLLOUT else value.to_numpy(zero_copy_only=False)
        found.append(Tree(**values))
    return found


def table(rows: Sequence[Tree]) -> pa.Table:
    """These rows as a table of `TREE_SCHEMA`; no row gives an empty one."""
    names = [field.name for field in fields(Tree)]
    return (
        pa.Table.from_pylist([], TREE_SCHEMA)
        if not rows
        else pa.concat_tables(
            [pa.Table.from_arrays([_one(getattr(row, name), name) for name in names], schema=TREE_SCHEMA) for row in rows]
        )
    )


def _one(values: Any, name: str) -> pa.Array:
    """A column of one row."""
    kind = TREE_SCHEMA.field(name).type
    array = pa.array(values, kind.value_type)
    return pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), array).cast(kind)
