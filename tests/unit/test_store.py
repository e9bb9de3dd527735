"""The store: calls and records come back exactly as they were, files are only added, and other programs read them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.config import Train
from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories import batch
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.store import calls as call_rows
from forge_ray.trajectories.store import rollouts as rollout_rows
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.samples import SampleStore
from forge_ray.trajectories.store.schema import CALLS, ROLLOUTS, VERSION_KEY, StoreError
from forge_ray.trajectories.store.writer import Ended, StoreWriter, unfinished
from tests.unit.making import make_call, make_record, make_rollout

ORIGIN = Origin("run", policy="policy", template_sha256="ab", harness_options={"react": {"output_chars": 200}})

# ---- calls ----

_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
_TIME = st.floats(0, 2e9, allow_nan=False)
_JSON = st.dictionaries(
    _TEXT, st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT, max_size=3
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Call]:
    """Calls of one rollout: each goes on from a part of any other's prompt + sample, in any order, or from nothing."""
    found: list[Call] = []
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.none() | st.sampled_from(found)) if found else None
        prompt, shared = draw(_IDS), 0
        if parent is not None:
            whole = parent.prompt_ids + parent.ids
            shared = draw(st.integers(0, len(whole)))
            prompt = whole[:shared] + prompt
        ids = draw(_IDS)
        cut = draw(st.integers(0, len(ids)))
        found.append(
            Call(
                id=f"c{number}",
                session="g00000-0.0",
                purpose="train",
                replica=draw(_TEXT),
                dialect=draw(_TEXT),
                path=draw(_TEXT),
                streamed=draw(st.booleans()),
                kind=draw(_TEXT),
                conversation=draw(_TEXT),
                prompt_ids=prompt,
                sampling=draw(_JSON.map(lambda values: {key: value for key, value in values.items() if key != "temperature"})),
                masked_by_grammar=draw(st.booleans()),
                max_tokens=draw(st.integers(0, 2**31 - 1)),
                opened=draw(_TIME),
                parent=parent.id if parent is not None else None,
                shared=shared,
                ids=ids,
                logprobs=draw(st.lists(st.floats(max_value=0, width=32, allow_nan=False), min_size=len(ids), max_size=len(ids))),
                spans=draw(st.none() | st.just([span for span in (("1.2", 0, cut), ("1.3", cut, len(ids))) if span[1] < span[2]])),
                version_open=draw(_TEXT),
                version_end=draw(_TEXT),
                status=draw(st.sampled_from(["open", "finished", "length", "cancelled", "failed"])),
                finish_reason=draw(st.none() | _TEXT),
                stop_reason=draw(st.none() | st.integers(0, 9) | _TEXT),
                error=draw(st.none() | _TEXT),
                ended=draw(st.none() | _TIME),
                delivered=draw(st.none() | st.booleans()),
                superseded_by=draw(st.none() | _TEXT),
                usage=draw(st.none() | _JSON),
                reply=draw(st.none() | _TEXT),
                request_sha256=draw(_TEXT),
                response_sha256=draw(_TEXT),
                splice=draw(_TEXT),
                reason=draw(st.none() | _TEXT),
                rerendered=draw(st.none() | _IDS),
                overlap=draw(st.integers(0, 9)),
                media=draw(st.lists(_TEXT, max_size=2)),
                spawned_by=draw(st.none() | _TEXT),
                ignored=draw(st.lists(_TEXT, max_size=2)),
                model=draw(st.none() | _TEXT),
                issued=draw(st.lists(_TEXT, max_size=2)),
                quarantined=draw(st.booleans()),
            )
        )
    return draw(st.permutations(found))


@given(conversations())
@settings(max_examples=150, deadline=None)
def test_a_call_comes_back_equal_and_its_prompt_whole(calls: list[Call]) -> None:
    rows = call_rows.table(calls)
    assert rows.schema.equals(CALLS.schema, check_metadata=True)
    assert [call.tolist() for call in call_rows.expand(rows)] == [call.prompt_ids for call in calls]
    through_parquet = pa.BufferOutputStream()
    pq.write_table(rows, through_parquet)
    assert call_rows.calls(pq.read_table(pa.BufferReader(through_parquet.getvalue())), "train") == calls
    assert rows["trainable"].to_pylist() == [call.trainable for call in calls]


def test_rows_hold_new_tokens_only() -> None:
    calls, prompt = [], [1, 2, 3]
    for turn in range(5):
        parent = calls[-1] if calls else None
        calls.append(make_call(prompt, [7, turn], order=turn, parent=parent and parent.id, shared=len(prompt) - 2 if parent else 0))
        prompt = [*prompt, 7, turn, 50, 51]
    rows = call_rows.table(calls)
    assert [len(new) for new in rows["new"].to_pylist()] == [3, 2, 2, 2, 2]
    assert call_rows.calls(rows, "train") == calls


def test_a_prompt_that_does_not_begin_as_its_parent_says_is_refused() -> None:
    first = make_call([1, 2, 3], [4], order=0)
    begins = (([1, 9, 3, 4, 5], 4), ([1, 2, 3, 9, 5], 4), ([1, 2, 3, 4], 5))
    for prompt, shared, parent in (*((*one, first.id) for one in begins), ([1, 2], 1, "other"), ([1, 2], 1, None)):
        with pytest.raises(StoreError, match=f"{first.session}/001"):
            call_rows.table([first, make_call(prompt, [5], order=1, parent=parent, shared=shared)])


def test_rows_without_their_ancestors_or_in_a_ring_are_refused() -> None:
    calls = [make_call([1, 2], [3], order=0), make_call([1, 2, 3, 4], [5], order=1, parent="g00000-0.0/000", shared=3)]
    rows = call_rows.table(calls)
    with pytest.raises(StoreError, match="not among the rows"):
        call_rows.expand(rows.slice(1))
    ring = rows.set_column(rows.column_names.index("parent"), CALLS.schema.field("parent"), [[calls[1].id, calls[0].id]])
    with pytest.raises(StoreError, match="own ancestor"):
        call_rows.expand(ring)


def test_half_a_surrogate_pair_does_not_keep_a_call_out() -> None:
    """JSON may hold one (`"model": "\\ud800"`), UTF-8 may not."""
    (back,) = call_rows.calls(call_rows.table([make_call([1], [2], model="a\ud800b", ignored=["\udfff"])]), "train")
    assert (back.model, back.ignored) == ("a\ufffdb", ["\ufffd"])


# ---- records ----


def test_a_record_comes_back_equal_with_its_origin_beside_it() -> None:
    calls = [make_call([1, 2], [3, 4], order=n, spans=[("0.3", 0, 1), ("0.4", 1, 2)]) for n in range(2)]
    record = make_record(
        "g00000-0.0", 0.5, rewards={"reward": 0.5, "format": 1.0}, seconds={"harness": 1.5, "total": 2.0}, exit_code=3, sampled_tokens=4
    )
    row = rollout_rows.row(record, calls, ORIGIN, ("log", 3))
    rows = rollout_rows.table([row, rollout_rows.row(make_record("g00000-1.0", None, sampled_tokens=7), [], ORIGIN)])
    assert rows.schema.equals(ROLLOUTS.schema, check_metadata=True)
    assert rollout_rows.records(rows, ["train", "train"]) == [record, make_record("g00000-1.0", None, sampled_tokens=7)]
    first, second = rows.to_pylist()
    assert (first["run"], first["policy"], first["template_sha256"], json.loads(first["harness_options"])) == (
        "run", "policy", "ab", {"output_chars": 200},
    )  # fmt: skip
    assert dict(first["versions"]) == {"0.3": 2, "0.4": 2} and first["sampling"] == ['{"temperature": 1.0}']
    assert (first["prompt_tokens"], first["sampled_tokens"], first["trainable_tokens"], first["verifier_log"]) == (4, 4, 4, "log")
    assert (second["versions"], second["verifier_log"]) == ([], None)


def test_what_a_newer_record_has_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(RolloutRecord):
        weather: dict[str, float] | None = None

    newer = Newer(**make_record("g00000-0.0", 1.0).model_dump(), weather={"rain": 0.5})
    rows = rollout_rows.table([rollout_rows.row(newer, [], ORIGIN)])
    assert json.loads(rows["extra"][0].as_py()) == {"weather": {"rain": 0.5}}
    monkeypatch.setattr(rollout_rows, "RolloutRecord", Newer)
    assert rollout_rows.records(rows, ["train"]) == [newer]


def test_a_log_that_is_no_text_is_readable_and_bounded(tmp_path: Path) -> None:
    assert rollout_rows.read_log(tmp_path / "none") == (None, 0)
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_bytes(b"\377\360\050\nfine")
    assert rollout_rows.read_log(short) == ("\ufffd\ufffd(\nfine", 8)
    long.write_bytes(b"begin" + bytes(range(256)) * 20_000 + b"end")  # 5 MB without an end of line
    text, size = rollout_rows.read_log(long)
    assert text is not None and size == long.stat().st_size and len(text) < 40_000
    assert text.startswith("begin") and text.endswith("end") and "bytes left out" in text
    record = make_record("g00000-0.0", 1.0)
    assert rollout_rows.table([rollout_rows.row(record, [], ORIGIN, (text, size))])["verifier_log"][0].as_py() == text


# ---- files ----


def query(text: str) -> list[tuple[Any, ...]]:
    """What DuckDB answers."""
    answer = duckdb.connect().sql(text)
    assert answer is not None
    return answer.fetchall()


def write(location: Location, *names: str, purpose: str = "train", samples: int = 2) -> list[tuple[RolloutRecord, list[Call]]]:
    writer = StoreWriter(location, ORIGIN)
    found = []
    for name in names:
        record, calls = make_rollout(name, 1.0, samples=samples)
        record, calls = record.model_copy(update={"purpose": purpose}), [Call(**{**vars(call), "purpose": purpose}) for call in calls]
        writer.add(record, calls)
        found.append((record, calls))
    assert writer.waiting == len(names) and writer.flush() == len(names) and writer.waiting == 0
    return found


def test_what_was_written_is_read_by_rollout_by_file_and_whole(tmp_path: Path) -> None:
    location = Location.of(tmp_path / "data")
    stored = write(location, "g00000-0.0", "g00000-1.0") + write(location, "g00001-0.0")
    stored += write(location, "eval-after-0-0.0", purpose="eval")
    stored += write(location, "g00002-0.0", samples=0)
    reader = StoreReader(location)
    assert {record.id: record for record in reader.rollouts()} == {record.id: record for record, _ in stored}
    assert [record.id for record in reader.rollouts("eval")] == ["eval-after-0-0.0"]
    assert all(reader.calls(record.id) == calls for record, calls in stored) and reader.calls("nobody") == []
    assert {record.id: calls for record, calls in reader.with_calls()} == {record.id: calls for record, calls in stored}
    rows = reader.call_rows(["g00001-0.0", "g00000-1.0"])
    assert rows["rollout"].to_pylist() == ["g00000-1.0"] * 2 + ["g00001-0.0"] * 2
    names = sorted(str(file.relative_to(tmp_path / "data")) for file in (tmp_path / "data").rglob("*") if file.is_file())
    assert len(names) == 7 and all(name.split("/")[1] in ("purpose=train", "purpose=eval") for name in names)


def test_a_reader_sees_more_after_a_refresh_and_files_never_change(tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    reader = StoreReader(location)
    assert reader.rollouts() == [] and reader.table("calls").num_rows == 0 and reader.samples().num_rows == 0
    write(location, "g00000-0.0")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.parquet")}
    write(location, "g00001-0.0")
    assert reader.rollouts() == []
    reader.refresh()
    assert len(reader.rollouts()) == 2
    assert {file: file.read_bytes() for file in before} == before


def test_several_writers_and_a_reader_at_once(tmp_path: Path) -> None:
    location, done = Location.of(tmp_path), threading.Event()

    def work(writer: int) -> None:
        for number in range(5):
            write(location, f"g{writer:05d}-{number}.0")

    def look() -> int:
        seen = 0
        while not done.is_set():
            reader = StoreReader(location)
            for record, calls in reader.with_calls():
                assert len(calls) == 2, record.id
            now = len(reader.rollouts())
            assert now >= seen
            seen = now
            if seen:
                query(f"select count(distinct rollout) from '{tmp_path}/calls/**/*.parquet'")
        return seen

    with ThreadPoolExecutor(5) as threads:
        reading = threads.submit(look)
        list(threads.map(work, range(4)))
        done.set()
        assert reading.result() <= 20
    reader = StoreReader(location)
    assert len({record.id for record in reader.rollouts()}) == len(reader.rollouts()) == 20 and reader.table("calls").num_rows == 40


def test_pandas_and_duckdb_read_it(tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    write(location, "g00000-0.0", "g00000-1.0", samples=3)
    write(location, "eval-after-0-0.0", purpose="eval")
    frame = pd.read_parquet(tmp_path / "calls")
    assert len(frame) == 8 and sorted(frame["purpose"].unique()) == ["eval", "train"]
    assert frame["ids"].iloc[0].dtype == np.int32 and frame["logprobs"].iloc[0].dtype == np.float32
    text = f"""
        select r.rollout, r.reward, count(*), sum(len(c.ids)), r.purpose
        from '{tmp_path}/rollouts/**/*.parquet' r join '{tmp_path}/calls/**/*.parquet' c using (rollout)
        where r.purpose = 'train' and c.trainable group by all order by 1
    """
    assert query(text) == [(f"g00000-{n}.0", 1.0, 3, 9, "train") for n in range(2)]
    assert query(f"select spans[1].version from '{tmp_path}/calls/**/*.parquet' limit 1") == [("0.3",)]


def test_columns_that_are_null_in_one_file_read_together_with_others(tmp_path: Path) -> None:
    """One task gives several numbers, another one, a third none: one schema."""
    location = Location.of(tmp_path)
    rewards: list[tuple[float | None, dict[str, float]]] = [(None, {}), (1.0, {"reward": 1.0}), (1.0, {"reward": 1.0, "format": 0.0})]
    for number, (reward, named) in enumerate(rewards):
        writer = StoreWriter(location, Origin("run"))
        writer.add(make_record(f"e-{number}.0", reward, group=None, rewards=named), [])
        writer.flush()
    rows = StoreReader(location).table("rollouts").sort_by("rollout").to_pylist()
    assert [(row["reward"], dict(row["rewards"])) for row in rows] == rewards
    assert pd.read_parquet(tmp_path / "rollouts")["group"].isna().tolist() == [True] * 3
    found = query(f"select avg(rewards['format']) from '{tmp_path}/rollouts/**/*.parquet'")
    assert found == [(0.0,)]


class Full(Exception):
    pass


def test_a_writer_that_died_between_the_two_files_stores_no_call_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = Location.of(tmp_path)
    write(location, "g00000-0.0")
    record, calls = make_rollout("g00001-0.0", 1.0, samples=2)
    put = Location.put

    def dies(self: Location, name: str, content: pa.Buffer) -> None:
        if name.startswith("rollouts/"):
            raise Full
        put(self, name, content)

    monkeypatch.setattr(Location, "put", dies)
    writer = StoreWriter(location, ORIGIN)
    writer.add(record, calls)
    with pytest.raises(Full):
        writer.flush()
    monkeypatch.setattr(Location, "put", put)
    reader = StoreReader(location)
    assert len(reader.rollouts()) == 1 and reader.calls("g00001-0.0") == [] and reader.table("calls").num_rows == 2
    ((part, ids),) = unfinished(location).items()
    assert ids == ["g00001-0.0"]
    StoreWriter(location, ORIGIN).finish(part, [Ended(record, calls)])
    assert unfinished(location) == {}
    reader.refresh()
    assert reader.calls("g00001-0.0") == calls and reader.table("calls").num_rows == 4


def test_a_second_try_after_a_full_disk_stores_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location, put = Location.of(tmp_path), Location.put
    left = {"calls/": 1, "rollouts/": 2}

    def full(self: Location, name: str, content: pa.Buffer) -> None:
        kind = name.partition("/")[0] + "/"
        if left[kind]:
            left[kind] -= 1
            raise StoreError("no space left on device")
        put(self, name, content)

    monkeypatch.setattr(Location, "put", full)
    writer = StoreWriter(location, ORIGIN)
    record, calls = make_rollout("g00000-0.0", 1.0, samples=2)
    writer.add(record, calls)
    later, later_calls = make_rollout("g00001-0.0", 1.0, samples=1)
    for expected in (1, 1, 2):
        with pytest.raises(StoreError):
            writer.flush()
        assert writer.waiting == expected
        if expected == 1 and not left["calls/"] and left["rollouts/"] == 1:
            writer.add(later, later_calls)
    assert writer.flush() == 2
    reader = StoreReader(location)
    assert (reader.calls(record.id), reader.calls(later.id)) == (calls, later_calls) and reader.table("calls").num_rows == 3


def test_a_rollout_that_cannot_be_stored_leaves_the_others_alone(tmp_path: Path) -> None:
    writer = StoreWriter(Location.of(tmp_path), ORIGIN)
    with pytest.raises(StoreError):
        writer.add(make_record("g00000-0.0", 1.0), [make_call([1], [2], parent="lost", shared=1)])
    writer.add(*make_rollout("g00000-1.0", 1.0))
    assert writer.flush() == 1 and [record.id for record in StoreReader(str(tmp_path)).rollouts()] == ["g00000-1.0"]


def test_half_written_files_are_seen_by_nobody_and_swept_away(tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    write(location, "g00000-0.0")
    left = tmp_path / "calls" / "purpose=train" / ".part-1.parquet.abcd.tmp"
    left.write_bytes(b"PAR1 half")
    assert StoreReader(location).table("calls").num_rows == 2 and len(pd.read_parquet(tmp_path / "calls")) == 2
    assert query(f"select count(*) from '{tmp_path}/calls/**/*.parquet'") == [(2,)]
    location.sweep()
    assert not left.exists() and len(list(tmp_path.rglob("*.parquet"))) == 2


def test_a_newer_or_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    write(location, "g00000-0.0")
    (file,) = (tmp_path / "rollouts").rglob("*.parquet")
    rows = pq.ParquetFile(file).read()
    for metadata, problem in (({VERSION_KEY: b"2"}, "version 2; this ForgeRay reads version 1"), ({}, "version none")):
        pq.write_table(rows.replace_schema_metadata(metadata), file)
        with pytest.raises(StoreError, match=f"{file.name}.*{problem}"):
            StoreReader(location).rollouts()
    file.write_bytes(b"no parquet")
    with pytest.raises(StoreError, match=file.name):
        StoreReader(location).rollouts()


# ---- samples ----


def test_the_batch_of_a_step_is_written_once_and_read_with_its_stats(tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    built = batch.build_step([[make_rollout(f"g00000-{n}.0", float(n)) for n in range(2)]], Train())
    samples = SampleStore(location)
    samples.write(12, built.table, {"taken": [0]})
    with pytest.raises(StoreError, match="stored already"):
        SampleStore(location).write(12, built.table, {})
    table, stats = SampleStore(location).read(12)
    assert table.equals(built.table) and stats == samples.stats(12) == {"taken": [0]} and SampleStore(location).steps == {12}
    with pytest.raises(StoreError, match="step=13"):
        samples.read(13)
    reader = StoreReader(location)
    assert reader.steps() == [12] and set(reader.samples()["step"].to_pylist()) == {12}
    assert reader.trained_in() == {"g00000-0.0": 12, "g00000-1.0": 12}
    assert set(pd.read_parquet(tmp_path / "samples")["step"]) == {12}
    assert query(f"select distinct step from '{tmp_path}/samples/**/*.parquet'") == [(12,)]
