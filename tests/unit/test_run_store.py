"""The store beside a run: what ended is stored once, whatever stopped in between."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import store
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogReader, CallLogWriter
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from tests.unit.making import make_record


def config(tmp_path: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "name": "run",
            "runs": str(tmp_path),
            "policy": {"model": "m"},
            "harnesses": [{"name": "react", "options": {"output_chars": 200}}],
            "tasks": {"train": "t"},
            **sections,
        }
    )


async def _record(run: RunDir, rollout: str, calls: int) -> RolloutRecord:
    """A rollout that ended, as its pool and its replica leave it: events in the call log, a record, a verifier's log."""
    writer = CallLogWriter(run.calls / f"{rollout}.jsonl")
    prompt = [1, 2]
    for number in range(calls):
        parent = f"{rollout}/{number - 1}" if number else None
        opened = {
            "event": "open", "call": f"{rollout}/{number}", "session": rollout, "purpose": "train", "replica": rollout, "t": 10.0 + number,
            "dialect": "chat", "path": "/v1/chat/completions", "streamed": False, "kind": "agent", "conversation": "main",
            "request_sha256": f"{number:064x}", "parent": parent, "shared": len(prompt) if parent else 0,
            "new": [50, 51] if parent else prompt, "sampling": {"temperature": 1.0}, "masked_by_grammar": False, "max_tokens": 9,
            "version": "1.0", "splice": "exact" if parent else "new",
        }  # fmt: skip
        ended = {
            "event": "finished", "call": f"{rollout}/{number}", "t": 10.5 + number, "ids": [7, number], "logprobs": [-0.5, -0.25],
            "spans": [["1.0", 0, 2]], "finish_reason": "stop", "stop_reason": None, "version": "1.0", "error": None,
        }  # fmt: skip
        delivered = {
            "event": "delivered",
            "call": f"{rollout}/{number}",
            "t": 10.6 + number,
            "response_sha256": "",
            "bytes": 1,
            "status": 200,
        }
        for event in (opened, ended, delivered):
            await writer.append(event)
        prompt = [*prompt, *([50, 51] if parent else []), 7, number]
    writer.close()
    record = make_record(rollout, 1.0, calls=calls, sampled_tokens=2 * calls)
    directory = run.rollouts / rollout
    directory.mkdir(parents=True)
    (directory / "verifier.log").write_bytes(b"\xff fine\n")
    (directory / "result.json").write_text(record.model_dump_json())
    return record


def ended(run: RunDir, rollout: str, calls: int = 3) -> RolloutRecord:
    return asyncio.run(_record(run, rollout, calls))


def recorded(run: RunDir, rollout: str) -> list[Call]:
    reader = CallLogReader(run.calls)
    reader.refresh()
    return reader.session(rollout)


def test_what_ends_is_stored_with_its_calls_log_and_origin(tmp_path: Path) -> None:
    settings = config(tmp_path, store={"flush_s": 3600})
    run = RunDir(tmp_path / "run").create()
    model = tmp_path / "m"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    thread = store.StoreThread(settings, run, model)
    records = [ended(run, f"g00000-{slot}.0", calls=slot) for slot in range(3)]
    for record in [*records, *records]:  # a pool that was restarted tells of a record again
        thread.ended(record)
    thread.close(60)
    reader = StoreReader(Location.of(run.data))
    assert reader.rollouts() == records
    assert all(reader.calls(record.id) == recorded(run, record.id) for record in records)
    assert [len(reader.calls(record.id)) for record in records] == [0, 1, 2]
    row = reader.table("rollouts").sort_by("rollout").to_pylist()[2]
    assert row["verifier_log"] == "\ufffd fine\n" and json.loads(row["harness_options"]) == {"output_chars": 200}
    assert len(row["template_sha256"]) == len(row["tokenizer_sha256"]) == 64 and row["run"] == "run"


def test_a_run_that_starts_again_stores_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    settings, run = config(tmp_path), RunDir(tmp_path / "run").create()
    first = [ended(run, f"g00000-{slot}.0") for slot in range(2)]
    writer = store.RolloutWriter(settings, run, None)
    assert writer.complete() == 2
    late = ended(run, "g00001-0.0")
    for _ in range(2):
        again = store.RolloutWriter(settings, run, None)
        again.complete()
        again.add(late)
        again.flush()
    reader = StoreReader(Location.of(run.data))
    assert reader.rollouts() == [*first, late] and reader.table("calls").num_rows == 9


KILLED = """
import sys
from pathlib import Path
from forge_ray.trajectories.store.location import Location
from forge_ray.job import store
from forge_ray.run_dir import RunDir
from tests.unit.test_run_store import config

where, at = Path(sys.argv[1]), int(sys.argv[2])
put, puts = Location.put, 0

def slow(self, name, content):
    global puts
    puts += 1
    if puts > at:
        print("here", flush=True)
        import time
        time.sleep(600)
    put(self, name, content)

Location.put = slow
store.RolloutWriter(config(where), RunDir(where / "run"), None).complete()
print("here", flush=True)
import time
time.sleep(600)
"""


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_sigkill_at_any_file_loses_nothing_and_stores_nothing_twice(tmp_path: Path, at: int) -> None:
    settings, run = config(tmp_path), RunDir(tmp_path / "run").create()
    records = [ended(run, f"g00000-{slot}.0") for slot in range(2)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(at)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert len(list(run.data.rglob("*.parquet"))) == at
    records.append(ended(run, "g00001-0.0"))
    store.RolloutWriter(settings, run, None).complete()
    reader = StoreReader(Location.of(run.data))
    assert reader.rollouts() == records and reader.table("calls").num_rows == 9
    assert all(reader.calls(record.id) == recorded(run, record.id) for record in records)


def test_a_store_that_cannot_be_written_is_tried_again_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, run = config(tmp_path, store={"flush_s": 0.05}), RunDir(tmp_path / "run").create()
    run.data.write_text("in the way")
    thread = store.StoreThread(settings, run, None)
    record = ended(run, "g00000-0.0")
    with caplog.at_level(logging.WARNING):
        thread.ended(record)
        deadline = time.monotonic() + 60
        while "tried again" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "tried again" in caplog.text
    run.data.unlink()
    thread.close(60)
    assert StoreReader(Location.of(run.data)).rollouts() == [record]


def test_a_rollout_that_fits_no_column_is_named_and_the_others_are_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, run = config(tmp_path), RunDir(tmp_path / "run").create()
    wrong, right = ended(run, "g00000-0.0"), ended(run, "g00000-1.0")
    log = run.calls / "g00000-0.0.jsonl"
    log.write_text(log.read_text().replace('"max_tokens":9', f'"max_tokens":{2**40}'))
    assert store.RolloutWriter(settings, run, None).complete() == 1
    assert f"rollout {wrong.id} cannot be stored" in caplog.text
    assert StoreReader(Location.of(run.data)).rollouts() == [right]


def test_the_location_is_the_config_s(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert store.location(config(tmp_path), run).local == run.data
    assert store.location(config(tmp_path, store={"location": str(tmp_path / "all")}), run).local == tmp_path / "all" / "run"
    with pytest.raises(UserError, match="nowhere"):
        store.location(config(tmp_path, store={"location": "nowhere://x"}), run)
