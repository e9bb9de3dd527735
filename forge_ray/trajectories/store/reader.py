"""The store's reader: whole tables for queries, `Call`s for whoever rebuilds, Ray Datasets for whoever goes on from there.

It sees what was stored when it was made, or at the last `refresh`; a run may go on writing meanwhile. A rollout's calls lie in the file of
the same name as its row, so that one rollout costs one file, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.store import calls as call_rows
from forge_ray.trajectories.store import rollouts as rollout_rows
from forge_ray.trajectories.store import upstream as upstream_rows
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.samples import NAME as SAMPLES
from forge_ray.trajectories.store.samples import SampleStore
from forge_ray.trajectories.store.schema import CALLS, ROLLOUTS, TABLES, UPSTREAM, StoreError, check_version
from forge_ray.trajectories.store.writer import BESIDE
from forge_ray.trajectories.upstream import UpstreamCall

if TYPE_CHECKING:
    import ray.data

_PURPOSE = pa.field("purpose", pa.string())


class StoreReader:
    """Reads the store at `location` (a `Location`, a directory or a URI). Raises `StoreError` where a file is none of a known version."""

    def __init__(self, location: Location | str) -> None:
        self.location = location if isinstance(location, Location) else Location.of(location)
        self._checked: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Take in what was stored since."""
        # Rollouts first: whatever row is seen, its calls were stored before.
        self._files = {ROLLOUTS.name: self.location.files(ROLLOUTS.name)}
        self._files |= {name: self.location.files(name) for name in TABLES if name != ROLLOUTS.name}
        rows = {file.partition("/")[2] for file in self._files[ROLLOUTS.name]}
        # Calls without their rollouts: their writer is not done with them, or died.
        for name in BESIDE:
            self._files[name] = [file for file in self._files[name] if file.partition("/")[2] in rows]
        self._parts: dict[str, str] | None = None
        self.samples_store = SampleStore(self.location)

    def dataset(self, name: str) -> ds.Dataset:
        """`calls`, `upstream`, `rollouts`, … as a pyarrow dataset, with the column `purpose`; `samples` with `step`."""
        if name == SAMPLES:
            return self._samples()
        for file in self._files[name]:
            self._check(file)
        schema = TABLES[name].schema.append(_PURPOSE)
        parts = ds.partitioning(pa.schema([_PURPOSE]), flavor="hive")
        paths = [self.location.path(file) for file in self._files[name]]
        if not paths:
            return ds.dataset(schema.empty_table())
        return ds.dataset(
            paths,
            schema=schema,
            format="parquet",
            filesystem=self.location.filesystem,
            partitioning=parts,
            partition_base_dir=self.location.path(name),
        )

    def table(self, name: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None) -> pa.Table:
        """Rows of a dataset in memory; `where` is a pyarrow expression over its columns."""
        return self.dataset(name).to_table(columns=None if columns is None else list(columns), filter=where)

    def ray(self, name: str, columns: Sequence[str] | None = None) -> ray.data.Dataset:
        """The dataset as a Ray Dataset; Ray must be up."""
        import ray.data
        from ray.data.datasource.partitioning import Partitioning, PartitionStyle

        files = self.location.files(SAMPLES) if name == SAMPLES else self._files[name]
        key, kind = ("step", int) if name == SAMPLES else (_PURPOSE.name, str)
        schema = self.dataset(name).schema  # refuses files of another version
        if not files:
            return ray.data.from_arrow(schema.empty_table())
        return ray.data.read_parquet(
            [self.location.path(file) for file in files],
            filesystem=self.location.filesystem,
            columns=None if columns is None else list(columns),
            partitioning=Partitioning(PartitionStyle.HIVE, self.location.path(name), [key], field_types={key: kind}),
        )

    # ---- rollouts and their calls ----

    def rollouts(self, purpose: str | None = None) -> list[RolloutRecord]:
        """The records, by the time they started; only those of `purpose`, if given."""
        where = None if purpose is None else pc.field(_PURPOSE.name) == purpose
        rows = self.table(ROLLOUTS.name, where=where)
        found = rollout_rows.records(rows, rows[_PURPOSE.name].to_pylist())
        return sorted(found, key=lambda record: (record.started, record.id))

    def calls(self, rollout: str) -> list[Call]:
        """The calls of one rollout by completion, exactly as they were recorded; empty for an unknown one."""
        part = self._part(rollout)
        if part is None or f"{CALLS.name}/{part}" not in self._files[CALLS.name]:
            return []
        rows = self._read(f"{CALLS.name}/{part}", [("rollout", "=", rollout)])
        return call_rows.calls(rows.sort_by("ordinal"), _purpose(part))

    def upstream(self, rollout: str) -> list[UpstreamCall]:
        """Its calls that another model answered, as text, by their end; empty for an unknown one."""
        part = self._part(rollout)
        if part is None or f"{UPSTREAM.name}/{part}" not in self._files[UPSTREAM.name]:
            return []
        rows = self._read(f"{UPSTREAM.name}/{part}", [("rollout", "=", rollout)])
        return upstream_rows.calls(rows.sort_by("ordinal"), _purpose(part))

    def call_rows(self, rollouts: Iterable[str]) -> pa.Table:
        """Rows of `calls.SCHEMA` of these rollouts, each one's together and by completion."""
        wanted: dict[str, list[str]] = {}
        for rollout in rollouts:
            if (part := self._part(rollout)) is not None and f"{CALLS.name}/{part}" in self._files[CALLS.name]:
                wanted.setdefault(part, []).append(rollout)
        tables = [self._read(f"{CALLS.name}/{part}", [("rollout", "in", names)]) for part, names in wanted.items()]
        return pa.concat_tables([call_rows.SCHEMA.empty_table(), *tables]).sort_by([("rollout", "ascending"), ("ordinal", "ascending")])

    def with_calls(self, purpose: str | None = None) -> Iterator[tuple[RolloutRecord, list[Call]]]:
        """Every rollout with its calls, file by file: memory holds the rows of one file and the calls of one rollout."""
        have = set(self._files[CALLS.name])
        for file in self._files[ROLLOUTS.name]:
            part = file.partition("/")[2]
            kind = _purpose(part)
            if purpose is not None and kind != purpose:
                continue
            rows = self._read(file)
            table = call_rows.SCHEMA.empty_table()
            if f"{CALLS.name}/{part}" in have:
                table = self._read(f"{CALLS.name}/{part}").sort_by([("rollout", "ascending"), ("ordinal", "ascending")])
            places: dict[str, list[int]] = {}
            for place, name in enumerate(table["rollout"].to_pylist()):
                places.setdefault(name, []).append(place)
            for record in rollout_rows.records(rows, [kind] * rows.num_rows):
                mine = places.get(record.id, [])
                yield record, call_rows.calls(table.slice(mine[0], len(mine)), kind) if mine else []

    # ---- samples ----

    def steps(self) -> list[int]:
        """Steps that were trained, or will be: those with a stored batch."""
        return sorted(self.samples_store.steps)

    def samples(self, step: int | None = None) -> pa.Table:
        """The samples of one step, or of all with the column `step`."""
        return self.samples_store.read(step)[0] if step is not None else self._samples().to_table()

    def trained_in(self) -> dict[str, int]:
        """Rollout -> the step whose batch it is in."""
        found: dict[str, int] = {}
        for step in self.steps():
            found |= dict.fromkeys(self.samples_store.rollouts(step), step)
        return found

    def _samples(self) -> ds.Dataset:
        paths = [self.location.path(file) for file in self.location.files(SAMPLES)]
        step = pa.schema([pa.field("step", pa.int32())])
        if not paths:
            from forge_ray.trajectories.schema import SCHEMA

            return ds.dataset(SCHEMA.append(step.field(0)).empty_table())
        parts = ds.partitioning(step, flavor="hive")
        return ds.dataset(
            paths, format="parquet", filesystem=self.location.filesystem, partitioning=parts, partition_base_dir=self.location.path(SAMPLES)
        )

    # ---- files ----

    def _part(self, rollout: str) -> str | None:
        if self._parts is None:
            self._parts = {}
            for file in self._files[ROLLOUTS.name]:
                part = file.partition("/")[2]
                self._parts |= dict.fromkeys(self._read(file, columns=["rollout"])["rollout"].to_pylist(), part)
        return self._parts.get(rollout)

    def _read(self, file: str, where: Any = None, columns: list[str] | None = None) -> pa.Table:
        self._check(file)
        path = self.location.path(file)
        try:
            schema = TABLES[file.partition("/")[0]].schema
            dataset = ds.dataset(path, schema=schema, format="parquet", filesystem=self.location.filesystem)
            return dataset.to_table(columns=columns, filter=pq.filters_to_expression(where) if where is not None else None)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"{path} cannot be read: {error}") from error

    def _check(self, file: str) -> None:
        if file in self._checked:
            return
        path = self.location.path(file)
        try:
            with self.location.filesystem.open_input_file(path) as opened:
                check_version(pq.read_schema(opened), path)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        self._checked.add(file)


def _purpose(part: str) -> str:
    return part.partition("=")[2].partition("/")[0]
