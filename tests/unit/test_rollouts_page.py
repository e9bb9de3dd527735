"""docs/rollouts.md: its lines for pandas and DuckDB give the prompts that were recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.writer import StoreWriter
from tests.unit.making import make_call, make_record

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"
NAME = "g00000-0.0"


def test_whole_prompts_come_of_plain_rows(tmp_path: Path) -> None:
    first = make_call([1, 2, 3], [4, 5], order=0, session=NAME)
    second = make_call([1, 2, 3, 4, 5, 6], [7], order=1, session=NAME, parent=first.id, shared=5)
    third = make_call([1, 2, 3, 4, 8], [9], order=2, session=NAME, parent=second.id, shared=4)
    writer = StoreWriter(Location.of(tmp_path), Origin("run"))
    writer.add(make_record(NAME, 1.0), [first, second, third])
    writer.flush()
    wanted = {call.id: list(call.prompt_ids) for call in StoreReader(Location.of(tmp_path)).calls(NAME)}
    assert list(wanted.values()) == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 8]]
    shown: dict[str, Any] = {}
    exec(next(code for code in PAGE.read_text().split("```python\n") if code.startswith("def prompt(")).partition("```")[0], shown)
    # Where a column has texts and nulls, a null is NaN in the one and None in the other.
    for table in (pd.read_parquet(tmp_path / "calls"), duckdb.connect().sql(f"from '{tmp_path}/calls/**/*.parquet'").df()):
        rows = {row["call"]: row for row in table.to_dict("records")}
        assert {name: shown["prompt"](row, rows) for name, row in rows.items()} == wanted
