"""The store's writer: rollouts that ended, gathered for a moment, then put as files of one name, the rollouts last.

    calls/purpose=train/part-<time>-<random>.parquet       every call of some rollouts
    upstream/purpose=train/part-<time>-<random>.parquet    their calls that another model answered, where there are any
    rollouts/purpose=train/part-<time>-<random>.parquet    those rollouts

Invariants:
- files are only added; each is whole when it can be seen, under a name that nobody else makes;
- a rollout is in the store when its row in `rollouts` is: its calls are there by then, in the files of the same name;
- a writer that died between the files leaves calls without their rollouts. The next one puts the missing files beside them
  (`unfinished`, `finish`), so no call is ever stored twice. Readers of this package pass over such calls, which others see early.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.store import calls as call_rows
from forge_ray.trajectories.store import rollouts as rollout_rows
from forge_ray.trajectories.store import upstream as upstream_rows
from forge_ray.trajectories.store.location import SUFFIX, Location
from forge_ray.trajectories.store.schema import CALLS, ROLLOUTS, UPSTREAM
from forge_ray.trajectories.upstream import UpstreamCall

BESIDE = (CALLS.name, UPSTREAM.name)
"""Datasets with a file beside one of `rollouts`, in the order in which they are put."""
GROUP_BYTES = 16 * 2**20
"""About so much of a table, in memory, is one row group."""
FULL_BYTES = 64 * 2**20
"""So much that waits is put without waiting for more."""


@dataclass(frozen=True)
class Ended:
    """A rollout that ended."""

    record: RolloutRecord
    calls: Sequence[Call]
    """By completion."""
    log: tuple[str | None, int] = (None, 0)
    """As `rollouts.read_log` gives it."""
    upstream: Sequence[UpstreamCall] = ()
    """Calls that another model answered, by their end."""


@dataclass
class _Part:
    """Rollouts of one purpose that go into files of one name."""

    purpose: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, list[pa.Table]] = field(default_factory=lambda: {name: [] for name in BESIDE})
    bytes: int = 0
    name: str = ""
    """Empty: it still takes rollouts."""
    stored: set[str] = field(default_factory=set)
    """Datasets whose file is stored, so that a second try does not store it again."""


class StoreWriter:
    """Writes rollouts into `location`. Not for several threads at once; several writers may write into one location."""

    def __init__(self, location: Location, origin: rollout_rows.Origin) -> None:
        self.location, self._origin = location, origin
        self._parts: list[_Part] = []

    def add(
        self, record: RolloutRecord, calls: Sequence[Call], log: tuple[str | None, int] = (None, 0), upstream: Sequence[UpstreamCall] = ()
    ) -> None:
        """Take a rollout that ended (`Ended`), with all its calls; the next `flush` stores it. Where this raises, nothing is taken."""
        tables = {CALLS.name: call_rows.table(calls), UPSTREAM.name: upstream_rows.table(upstream)}
        row = rollout_rows.row(record, calls, self._origin, log)
        rollout_rows.table([row])
        part = next((part for part in self._parts if part.purpose == record.purpose and not part.name), None)
        if part is None:
            self._parts.append(part := _Part(record.purpose))
        part.rows.append(row)
        for name, table in tables.items():
            part.tables[name].append(table)
        part.bytes += sum(table.nbytes for table in tables.values()) + len(log[0] or "")

    @property
    def waiting(self) -> int:
        """Rollouts that are not stored yet."""
        return sum(len(part.rows) for part in self._parts)

    @property
    def full(self) -> bool:
        return sum(part.bytes for part in self._parts) >= FULL_BYTES

    def flush(self) -> int:
        """Store what was added; returns the number of rollouts. Raises `StoreError` where the location takes no file: the rest goes on
        waiting."""
        stored = 0
        while self._parts:
            part = self._parts[0]
            part.name = part.name or f"part-{time.time_ns():020d}-{secrets.token_hex(4)}"
            for name in BESIDE:
                if name not in part.stored and (table := pa.concat_tables(part.tables[name])).num_rows:
                    self.location.put(_file(name, part.purpose, part.name), parquet(table))
                part.stored.add(name)
            self.location.put(_file(ROLLOUTS.name, part.purpose, part.name), parquet(rollout_rows.table(part.rows)))
            stored += len(part.rows)
            del self._parts[0]
        return stored

    def finish(self, part: str, found: Iterable[Ended]) -> None:
        """Put the missing files beside the calls of an `unfinished` part: `found` are the rollouts whose calls it holds."""
        ended = list(found)
        if not ended:
            return
        upstream = f"{UPSTREAM.name}/{part}"
        if upstream not in self.location.files(UPSTREAM.name):
            table = pa.concat_tables([upstream_rows.table(one.upstream) for one in ended])
            if table.num_rows:
                self.location.put(upstream, parquet(table))
        rows = [rollout_rows.row(one.record, one.calls, self._origin, one.log) for one in ended]
        self.location.put(f"{ROLLOUTS.name}/{part}", parquet(rollout_rows.table(rows)))


def unfinished(location: Location) -> dict[str, list[str]]:
    """Parts that have no file in `rollouts`: `purpose=…/part-….parquet` -> ids of the rollouts whose calls their other files hold."""
    parts = {name: {PurePosixPath(file).relative_to(name) for file in location.files(name)} for name in (*BESIDE, ROLLOUTS.name)}
    found: dict[str, set[str]] = {}
    for name in BESIDE:
        for part in sorted(parts[name] - parts[ROLLOUTS.name]):
            with location.filesystem.open_input_file(location.path(name, str(part))) as file:
                column = pq.read_table(file, columns=["rollout"])["rollout"]
            found.setdefault(str(part), set()).update(column.to_pylist())
    return {part: sorted(rollouts) for part, rollouts in found.items()}


def parquet(table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> pa.Buffer:
    """`table` as the content of a Parquet file, its row groups small enough to be read one by one."""
    if metadata:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})
    rows = max(1, table.num_rows * GROUP_BYTES // max(table.nbytes, 1))
    # A dictionary of token ids or of numbers would be as long as the column.
    small: Any = [field.name for field in table.schema if pa.types.is_string(field.type)]
    out = pa.BufferOutputStream()
    pq.write_table(table, out, compression="zstd", row_group_size=rows, use_dictionary=small)
    return out.getvalue()


def _file(dataset: str, purpose: str, name: str) -> str:
    return f"{dataset}/purpose={purpose}/{name}{SUFFIX}"
