"""The store under what goes wrong around it: readers that look in between, writers that die, files of other versions, odd names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from forge_ray.config import Train
from forge_ray.trajectories import batch
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.samples import SampleStore
from forge_ray.trajectories.store.schema import TABLES, StoreError
from tests.unit.making import make_rollout, store_rollouts


@pytest.mark.parametrize("listed", range(len(TABLES)))
def test_a_reader_that_looks_while_a_rollout_is_stored_sees_it_whole_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    """A listing of each dataset takes its time; the writer puts its files between any two of them."""
    location, files, seen = Location.of(tmp_path), Location.files, 0
    store_rollouts(location, "g00000-0.0")

    def slow(self: Location, *parts: str) -> list[str]:
        nonlocal seen
        found = files(self, *parts)
        if seen == listed:
            store_rollouts(location, "g00001-0.0")
        seen += 1
        return found

    monkeypatch.setattr(Location, "files", slow)
    reader = StoreReader(location)
    monkeypatch.setattr(Location, "files", files)
    for record, calls in reader.with_calls():
        assert len(calls) == 2 == len(reader.calls(record.id)), record.id
    assert len(reader.table("calls")) == 2 * len(reader.rollouts())


def test_a_directory_that_is_made_while_it_is_listed_is_no_error(tmp_path: Path) -> None:
    """Arrow looks for a directory that it could not open, and complains where a writer has made it in between."""
    plain = Location.of(tmp_path)

    class MadeMeanwhile:
        def get_file_info(self, selector: Any) -> Any:
            if not (tmp_path / "rollouts").exists():
                store_rollouts(plain, "g00000-0.0")
                raise FileNotFoundError(2, f"Cannot list directory '{selector.base_dir}'")
            return plain.filesystem.get_file_info(selector)

    filesystem: Any = MadeMeanwhile()
    assert Location(filesystem, plain.root, plain.name).files("rollouts") == plain.files("rollouts") != []


def test_a_file_system_without_uploads_shows_no_file_that_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location, written = Location.of(f"memory://{tmp_path}/store"), MemoryFile.write

    def full(self: Any, content: Any) -> int:
        written(self, bytes(content)[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MemoryFile, "write", full)
    with pytest.raises(StoreError, match="No space left"):
        store_rollouts(location, "g00000-0.0")
    assert StoreReader(location).rollouts() == [] and len(MemoryFileSystem().find(location.root)) == 1, "half of one is there"
    monkeypatch.setattr(MemoryFile, "write", written)
    store_rollouts(location, "g00000-0.0")
    assert [record.id for record in StoreReader(location).rollouts("train")] == ["g00000-0.0"]
    location.probe()


def test_a_file_that_came_out_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location, written = Location.of(f"memory://{tmp_path}/store"), MemoryFile.write

    def loses(self: Any, content: Any) -> int:
        written(self, bytes(content)[: len(content) // 2])
        return len(content)

    monkeypatch.setattr(MemoryFile, "write", loses)
    with pytest.raises(StoreError, match=r"has \d+ bytes after \d+ were written"):
        store_rollouts(location, "g00000-0.0")
    assert StoreReader(location).rollouts() == [] and location.files() == []


@pytest.mark.parametrize("builder", ["chain", "tree"])
def test_a_batch_of_a_newer_version_is_refused_by_name(tmp_path: Path, builder: str) -> None:
    location, key = Location.of(tmp_path), b"forge_ray.trees" if builder == "tree" else b"forge_ray.samples"
    built = batch.build_step([[make_rollout(f"g00000-{n}.0", float(n)) for n in range(2)]], Train.model_validate({"builder": builder}))
    table = built.table.replace_schema_metadata({key: b"2"})
    SampleStore(location).write(3, table, {})
    for look in (lambda: SampleStore(location).read(3), lambda: StoreReader(location).trained_in()):
        with pytest.raises(StoreError, match=r"step=3.*of version 2; this ForgeRay reads version 1"):
            look()


@pytest.mark.parametrize("place", ["{}/a b/ü#%20?=&+", "{}/purpose=eval/step=7/x", "{}/a/../b", "memory://{}/a b/ü%23", "file://{}/c d/ä"])
def test_the_place_may_have_any_name(tmp_path: Path, place: str) -> None:
    location = Location.of(place.format(tmp_path), "run one")
    store_rollouts(location, "g00000-0.0", "g00000-1.0")
    reader = StoreReader(Location.of(place.format(tmp_path), "run one"))
    assert len(reader.rollouts("train")) == 2 and reader.rollouts("eval") == [] and len(reader.calls("g00000-1.0")) == 2
    assert set(reader.table("calls")["purpose"].to_pylist()) == {"train"}
    built = batch.build_step([[make_rollout(f"g00000-{n}.0", float(n)) for n in range(2)]], Train())
    SampleStore(location).write(5, built.table, {})
    assert set(reader.samples()["step"].to_pylist()) == {5} and StoreReader(location).trained_in() == {f"g00000-{n}.0": 5 for n in range(2)}


def test_a_file_of_an_older_version_reads_with_nulls_where_it_has_no_column(tmp_path: Path) -> None:
    """A column that may be null can be younger than a file."""
    location = Location.of(tmp_path)
    store_rollouts(location, "g00000-0.0")
    for name in ("calls", "rollouts"):
        (file,) = (tmp_path / name).rglob("*.parquet")
        table = pq.ParquetFile(file).read()
        pq.write_table(
            table.drop_columns([field.name for field in table.schema if field.nullable and field.name not in ("spans", "parent")]), file
        )
    store_rollouts(location, "g00001-0.0")
    reader = StoreReader(location)
    assert [record.reward for record in reader.rollouts()] == [None, 1.0]
    old, new = (calls for _, calls in reader.with_calls())
    assert [call.ids for call in old] == [call.ids for call in new] and old[0].ended is None and new[0].ended is not None
    assert pa.types.is_float64(reader.table("calls").schema.field("ended").type)
