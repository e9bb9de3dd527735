"""Samples through Ray Data: from references as the worker reads them, and from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_ray.config import Train
from forge_ray.train_loop import forward
from forge_ray.trajectories import batch, schema, split
from tests.unit.making import make_rollout


@pytest.fixture
def table(cluster: None):
    return batch.build_step([[make_rollout(f"r{n}.0", n % 2, samples=2) for n in range(4)]], Train()).table


def test_a_share_has_the_same_rows_and_needs_no_cpu(table) -> None:
    """Where the train worker and the replicas have taken a small cluster's CPUs there is none left for a task of Ray Data."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from forge_ray.train_loop import worker

    @ray.remote(num_cpus=0)
    def read(refs: list[Any]) -> list[Any]:
        return forward.rows(schema.conform(worker.share(refs)))

    free = placement_group([{"CPU": ray.available_resources()["CPU"]}])
    ray.get(free.ready(), timeout=60)
    try:
        for part in split.split(table, 2):
            reference: Any = ray.put(part)
            rows, made = ray.get(read.remote([reference]), timeout=120), forward.rows(part)
            assert [(row.name, row.ids.tolist(), row.advantages.tolist()) for row in rows] == [
                (row.name, row.ids.tolist(), row.advantages.tolist()) for row in made
            ]
            assert len(made) == 4
    finally:
        remove_placement_group(free)


def test_a_column_that_is_null_throughout_the_first_file_keeps_its_type(table, tmp_path: Path) -> None:
    import ray.data

    rows = table.to_pylist()
    for row in rows:
        row["group"] = row["reward"] = None
    pq.write_table(pa.Table.from_pylist(rows, schema.SCHEMA), tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "b.parquet")
    read = ray.data.read_parquet(str(tmp_path)).take_all()
    assert len(read) == 2 * table.num_rows
    assert {row["group"] for row in read} == {None, 0}
    assert {row["reward"] for row in read if row["reward"] is not None} == {0.0, 1.0}
