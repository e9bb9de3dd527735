"""The table of samples keeps one schema through Parquet and Ray-free readers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_ray.config import Train
from forge_ray.trajectories import batch, schema
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.samples import SampleStore
from forge_ray.trajectories.tree_schema import TREE_SCHEMA
from tests.unit.making import make_rollout


def table_of(rewards: list[float | None]) -> pa.Table:
    return batch.build_step([[make_rollout(f"g00000-{n}.0", reward) for n, reward in enumerate(rewards)]], Train()).table


@pytest.mark.parametrize(("builder", "kind"), [("chain", schema.SCHEMA), ("per_call", schema.SCHEMA), ("tree", TREE_SCHEMA)])
def test_a_step_comes_back_equal_out_of_the_run_whatever_its_builder(builder: str, kind: pa.Schema, tmp_path: Path) -> None:
    groups = [[make_rollout(f"g00000-{n}.0", n, samples=2) for n in range(2)]]
    table = batch.build_step(groups, Train.model_validate({"builder": builder})).table
    samples = SampleStore(Location.of(str(tmp_path)))
    samples.write(3, table, {"groups": 1})
    back, stats = samples.read(3)
    assert back.equals(table) and back.schema.equals(kind, check_metadata=True) and stats == {"groups": 1}
    loose = pa.table({name: table.column(name) for name in reversed(kind.names)})
    assert schema.conform(loose).equals(table) and schema.conform(loose).schema.equals(kind, check_metadata=True)


def test_every_file_has_the_same_schema_whatever_its_rows_hold(tmp_path: Path) -> None:
    full = table_of([1, 0])
    rows = full.to_pylist()
    for row in rows:
        row |= {
            "group": None,
            "reward": None,
            "ids": [],
            "mask": [],
            "logprobs": [],
            "steps": [],
            "temperature": [],
            "call": [],
            "advantage": [],
            "weight": [],
        }
    for name, table in {"full": full, "empty": table_of([]), "nulls": pa.Table.from_pylist(rows, schema.SCHEMA)}.items():
        pq.write_table(schema.conform(table), tmp_path / f"{name}.parquet")
        assert pq.read_table(tmp_path / f"{name}.parquet").schema.equals(schema.SCHEMA)
    together = pq.read_table(tmp_path)
    assert together.num_rows == 4 and together.schema.equals(schema.SCHEMA)


def test_what_is_no_table_of_samples_is_refused() -> None:
    with pytest.raises(schema.SchemaError, match="column weight is missing"):
        schema.conform(table_of([1, 0]).drop_columns(["weight"]))
    table = table_of([1, 0])
    with pytest.raises(schema.SchemaError):
        schema.conform(table.set_column(table.column_names.index("sample"), "sample", pa.array(["x", "y"])))
