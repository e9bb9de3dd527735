"""One sample per trained call: its prompt, then what it sampled. OpenForgeRL's own form; samples grow with the number of calls."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from forge_ray.trajectories.builders.rows import Row, table
from forge_ray.trajectories.trajectory import Trajectory
from forge_ray.trajectories.trie import Trie, add


def build(trajectories: Sequence[Trajectory]) -> pa.Table:
    """Samples in the order of the calls; see `forge_ray.trajectories.builders`."""
    return table(trajectories, [_rows(trajectory) for trajectory in trajectories])


def _rows(trajectory: Trajectory) -> list[Row]:
    trie = Trie()
    ends = add(trie, trajectory)
    return [Row(trie.spell(ends.whole[ordinal]), [ordinal]) for ordinal in sorted(trajectory.shares)]
