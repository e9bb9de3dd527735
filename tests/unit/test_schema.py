"""The table of samples keeps one schema through Parquet and Ray-free readers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_ray.config import Train
from forge_ray.trajectories import batch, schema
from tests.unit.making import make_rollout


def table_of(rewards: list[float | None]) -> pa.Table:
    return batch.build_step([[make_rollout(f"g00000-{n}.0", reward) for n, reward in enumerate(rewards)]], Train()).table


def test_a_batch_comes_back_equal_with_its_stats(tmp_path: Path) -> None:
    table = table_of([1, 0])
    schema.write_batch(tmp_path / "b" / "step.parquet", table, {"groups": 1, "outcomes": {"ok": 2}})
    back, stats = schema.read_batch(tmp_path / "b" / "step.parquet")
    assert back.equals(table) and back.schema.equals(schema.SCHEMA, check_metadata=True)
    assert stats == {"groups": 1, "outcomes": {"ok": 2}}
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["step.parquet"]


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
        schema.write_batch(tmp_path / f"{name}.parquet", table)
        assert pq.read_table(tmp_path / f"{name}.parquet").schema.equals(schema.SCHEMA)
    together = pq.read_table(tmp_path)
    assert together.num_rows == 4 and together.schema.equals(schema.SCHEMA)


def test_a_table_that_lost_order_nullability_and_metadata_is_put_right() -> None:
    table = table_of([1, 0])
    loose = pa.table({name: table.column(name) for name in reversed(schema.SCHEMA.names)})
    assert schema.conform(loose).equals(table) and schema.conform(loose).schema.equals(schema.SCHEMA, check_metadata=True)


def test_what_is_no_table_of_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(schema.SchemaError, match="column weight is missing"):
        schema.conform(table_of([1, 0]).drop_columns(["weight"]))
    table = table_of([1, 0])
    with pytest.raises(schema.SchemaError):
        schema.conform(table.set_column(table.column_names.index("sample"), "sample", pa.array(["x", "y"])))
    (tmp_path / "half.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(schema.SchemaError, match=r"half\.parquet"):
        schema.read_batch(tmp_path / "half.parquet")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    schema.write_batch(path, table_of([1, 0]), {"n": 1})
    with pytest.raises(TypeError):
        schema.write_batch(path, table_of([1, 0]), {"n": object()})
    assert schema.read_batch(path)[1] == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]
