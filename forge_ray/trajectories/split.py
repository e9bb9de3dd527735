"""Cutting a step's table into shares: for train workers, and for the optimizer updates of a step. Whole trajectories, always.

Rows of samples are balanced by the tokens that are forwarded. A trie of many rollouts is cut along its own order, the same number of
rollouts to each share, so that neighbours, which have most in common, stay together: a share pays for a prefix once, whoever else has it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.tree_rows import restrict, trees
from forge_ray.trajectories.tree_rows import table as table_of
from forge_ray.trajectories.tree_schema import is_tree


def split(table: pa.Table, parts: int) -> list[pa.Table]:
    """`parts` tables. Of samples: every row once, balanced by the tokens that are forwarded. Of tries: tries of fewer rollouts, with what
    is in the loss alone (`tree_rows.restrict`). Parts may be empty."""
    return _split_trees(table, parts) if is_tree(table) else _split_rows(table, parts)


def partition(sizes: Sequence[int], parts: int, *, seed: int | str | None = None) -> list[list[int]]:
    """Indices of `sizes` in `parts` lists of near-equal sums, each in rising order; a pure function of its arguments.

    Largest first into the emptiest part. With `seed`, in a random order instead: another composition for each pass over the data.
    """
    order = list(range(len(sizes)))
    if seed is None:
        order.sort(key=lambda index: (-sizes[index], index))
    else:
        random.Random(f"partition {seed}").shuffle(order)
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, 0)] * parts
    for index in order:
        # The number of items breaks ties, so that items of size 0 spread as well.
        part = min(range(parts), key=lambda p: (*loads[p], p))
        shares[part].append(index)
        loads[part] = (loads[part][0] + sizes[index], loads[part][1] + 1)
    return [sorted(share) for share in shares]


def tokens(table: pa.Table) -> tuple[int, int]:
    """(forwarded, trained): tokens of the rows in the loss, or of the tries as far as they are; and positions or emissions in the loss."""
    trained = int((flat(table, "weight") > 0).sum())
    if is_tree(table):
        return sum(len(restrict(tree, range(len(tree.rollouts)))) for tree in trees(table)), trained
    lengths, used = _row_sizes(table)
    return int(lengths[used].sum()), trained


def flat(table: pa.Table, column: str) -> np.ndarray:
    """The values of a column of lists, one after another."""
    return table.column(column).combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _split_rows(table: pa.Table, parts: int) -> list[pa.Table]:
    trajectories: dict[str, list[int]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    lengths, used = _row_sizes(table)
    for row, name in enumerate(table.column("rollout").to_pylist()):
        trajectories[name].append(row)
        sizes[name] += int(lengths[row]) if used[row] else 0
    names = list(trajectories)
    shares = partition([sizes[name] for name in names], parts)
    return [table.take(pa.array([row for index in share for row in trajectories[names[index]]], pa.int64())) for share in shares]


def _split_trees(table: pa.Table, parts: int) -> list[pa.Table]:
    rows = trees(table)
    members = [(row, int(owner)) for row, tree in enumerate(rows) for owner in np.unique(tree.owner[tree.weight > 0])]
    if all(len(tree.rollouts) == 1 for tree in rows):
        shares = partition([len(rows[row]) for row, _ in members], parts)
    else:
        shares = [share.tolist() for share in np.array_split(np.arange(len(members)), parts)]
    found = []
    for share in shares:
        owners: dict[int, list[int]] = defaultdict(list)
        for index in share:
            row, owner = members[index]
            owners[row].append(owner)
        found.append(table_of([restrict(rows[row], chosen) for row, chosen in owners.items()]))
    return found


def _row_sizes(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Of each row of samples: its tokens, int64, and whether any is in the loss."""
    lengths = np.asarray(table.column("ids").combine_chunks().value_lengths(), dtype=np.int64)
    counts = np.zeros(int(lengths.sum()) + 1, np.int64)
    counts[1:] = np.cumsum(flat(table, "weight") > 0)
    ends = np.cumsum(lengths)
    return lengths, counts[ends] > counts[ends - lengths]
