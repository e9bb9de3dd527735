"""The dataset `samples`: what each step trained on, one file per step, `samples/step=12/batch.parquet`.

A step's file is put once, whole, before its batch is offered to the learner; a run that starts again trains the same file. Its rows are of
one of the schemas of `forge_ray.trajectories` (rows of sequences or of tries, by the builder), and its metadata holds what is known of the
batch as JSON (`stats`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forge_ray.trajectories import schema
from forge_ray.trajectories.store.location import SUFFIX, Location
from forge_ray.trajectories.store.schema import StoreError
from forge_ray.trajectories.store.writer import parquet

NAME = "samples"
_FILE = re.compile(rf"{NAME}/step=(\d+)/batch{re.escape(SUFFIX)}")


class SampleStore:
    """The step batches in `location`. One process at a time writes; which steps are there is asked once and remembered."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._known: set[int] | None = None

    @property
    def steps(self) -> set[int]:
        """Steps whose batch is stored."""
        if self._known is None:
            found = (_FILE.fullmatch(file) for file in self._location.files(NAME))
            self._known = {int(match[1]) for match in found if match is not None}
        return self._known

    def write(self, step: int, table: pa.Table, stats: Mapping[str, Any]) -> None:
        """Store the batch of `step`, on disk when this returns. Raises `StoreError`, also where it is stored already."""
        if step in self.steps:
            raise StoreError(f"the batch of step {step} is stored already, and a stored batch never changes")
        self._location.put(file(step), parquet(table, {schema.STATS: json.dumps(dict(stats)).encode()}))
        self.steps.add(step)

    def read(self, step: int) -> tuple[pa.Table, dict[str, Any]]:
        """Samples and stats of `step`. Raises `StoreError` where there is none, or a file that holds something else."""
        try:
            with self._location.filesystem.open_input_file(self._location.path(file(step))) as opened:
                table = pq.read_table(opened)
            return schema.conform(table), json.loads((table.schema.metadata or {}).get(schema.STATS, b"{}"))
        except (OSError, pa.ArrowException, ValueError, schema.SchemaError) as error:
            raise StoreError(f"{self._location.path(file(step))} holds no samples: {error}") from error

    def rollouts(self, step: int) -> list[str]:
        """The rollouts that have samples in the batch of `step`; no token is read. Raises `StoreError` like `read`."""
        try:
            with self._location.filesystem.open_input_file(self._location.path(file(step))) as opened:
                found = pq.read_schema(opened)
                schema.check_version(found)
                column = "rollouts" if "rollouts" in found.names else "rollout"
                opened.seek(0)
                names = pq.read_table(opened, columns=[column])[column]
        except (OSError, pa.ArrowException, ValueError, KeyError, schema.SchemaError) as error:
            raise StoreError(f"{self._location.path(file(step))} holds no samples: {error}") from error
        # A row of tries names all its rollouts.
        rows = names.to_pylist()
        return list(dict.fromkeys(name for row in rows for name in row) if column == "rollouts" else dict.fromkeys(rows))

    def stats(self, step: int) -> dict[str, Any]:
        """The stats of `step`, without its samples. Raises `StoreError` like `read`."""
        try:
            with self._location.filesystem.open_input_file(self._location.path(file(step))) as opened:
                return json.loads((pq.read_schema(opened).metadata or {}).get(schema.STATS, b"{}"))
        except (OSError, pa.ArrowException, ValueError) as error:
            raise StoreError(f"{self._location.path(file(step))} holds no samples: {error}") from error


def file(step: int) -> str:
    """Path of a step's batch below the store's root. No zeros in front: DuckDB would take the step for a text."""
    return f"{NAME}/step={step}/batch{SUFFIX}"
