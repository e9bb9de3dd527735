"""Which `Part` a step batch becomes: by the builder that made its table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_ray.train_loop import forward
from forge_ray.train_loop.part import Part, Passes
from forge_ray.train_loop.rows import Rows

if TYPE_CHECKING:
    import pyarrow

    from forge_ray.config import Train


def of(table: pyarrow.Table, train: Train, passes: Passes) -> Part:
    """This rank's part, of its share of the batch (the columns of the builder's schema)."""
    from forge_ray.trajectories.tree_schema import is_tree

    if is_tree(table):
        from forge_ray.train_loop.tree.forest import forest
        from forge_ray.train_loop.tree.tries import Tries

        return Tries(forest(table), train.tree.piece_tokens or passes.max_tokens)
    from forge_ray.trajectories.schema import conform

    return Rows(forward.rows(conform(table)))
