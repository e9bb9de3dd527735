"""Builders: from trajectories (the calls of rollouts, with their shares of the loss) to one table of what is trained.

`per_call` and `chain` make rows of `schema.SCHEMA`, `tree` rows of `tree_schema.TREE_SCHEMA`. The calls in a trajectory's `shares` are
trained; the tokens of every other call are context where they stand in a later call's prompt, and nothing else.

Every builder keeps these: the trained tokens over all rows are exactly the sampled tokens of the calls in `shares`, each once; the ids of
a row, or of a path in a trie, are what the engine saw, a prompt and then its sampled ids; the result depends on nothing but the arguments.
Never does `tree` hold more tokens than `chain`, or `chain` more than `per_call`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from forge_ray.trajectories.builders import chain, per_call, tree
from forge_ray.trajectories.trajectory import Trajectory

BUILDERS = ("chain", "per_call", "tree")
"""The names in `train.builder`."""


def build(name: str, trajectories: Sequence[Trajectory], *, span: str = "step") -> pa.Table:
    """What builder `name` makes of the trajectories, in their order. `span` (tree): one trie for the `step`, or one for each `rollout`.

    Raises `TrajectoryError` for a trained call that contradicts itself."""
    for trajectory in trajectories:
        trajectory.check()
    if name == "tree":
        return tree.build(trajectories, span=span)
    return {"chain": chain.build, "per_call": per_call.build}[name](trajectories)
