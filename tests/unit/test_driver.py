"""The driver's own decisions, with the parts around it made small: no Ray, no proxy."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_ray.config import Config
from forge_ray.job.driver import Driver
from forge_ray.job.library import Recordings
from forge_ray.job.runtime import RunFailed
from forge_ray.job.scheduler import TaskRef
from forge_ray.report.metrics import MetricsWriter, read_rows
from forge_ray.report.records import evaluation_points, evaluations, read_records
from forge_ray.run_dir import RunDamaged, RunDir
from forge_ray.train_loop.trainer import TrainingFailed
from forge_ray.trajectories.batch import BatchError, build_step
from forge_ray.trajectories.call_log import CallLogWriter
from forge_ray.trajectories.store.schema import StoreError
from tests.stored_run import store
from tests.unit.making import make_call, make_record


class Remote:
    """A method as an actor handle has it."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class FakeExchange:
    """Events that were posted, and nothing else."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.posted = events
        self.events = Remote(self._events)
        self.forget_before = Remote(self._nothing)

    async def _events(self, start: int, timeout: float) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        return self.posted[start:]

    async def _nothing(self, *_: Any) -> None:
        return None


class EndedTrainer:
    """Its workers have returned before anybody asked."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error

    def done(self) -> bool:
        return True

    def check(self) -> None:
        if self.error:
            raise TrainingFailed(self.error)


def config(**sections: Any) -> Config:
    tree = {"name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t", "heldout": "h"}}
    return Config.model_validate({**tree, **sections})


def driver(tmp_path: Path, events: list[dict[str, Any]], trainer: Any, **sections: Any) -> Driver:
    run = RunDir(tmp_path / "run").create()
    quiet = SimpleNamespace(**{name: lambda *_: None for name in ("phase", "step", "rollouts", "warn", "note")})
    parts: Any = {"client": SimpleNamespace(), "dispatch": None, "metrics": quiet, "progress": quiet}
    return Driver(config(**sections), run, [TaskRef("t", "/t")], [], exchange=FakeExchange(events), trainer=trainer, **parts)


async def test_a_trainer_that_has_returned_already_still_gives_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    async def sync(_: Any, run: RunDir, path: str, version: str, settings: Any, *, node: str | None) -> dict[str, Any]:
        synced.append((path, version))
        return {"replaced": []}

    monkeypatch.setattr("forge_ray.train_loop.weight_sync.sync", sync)
    weights = {"kind": "weights", "step": 4, "version": "2.4", "path": "w", "metrics": None, "restored": None, "stats": None}
    subject = driver(tmp_path, [{"kind": "progress", "phase": "sft", "detail": "x"}, weights], EndedTrainer())
    await asyncio.wait_for(subject.first_weights(), 60)
    assert subject.version == 4 and synced == [("w", "2.4")]


async def test_a_step_tells_who_waited_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sync(*_: Any, **__: Any) -> dict[str, Any]:
        return {"replaced": ["slow"]}

    async def status(**_: Any) -> list[dict[str, Any]]:
        return [{"replica": "r", "sampled_tokens": 7}]

    monkeypatch.setattr("forge_ray.train_loop.weight_sync.sync", sync)
    counts = dict.fromkeys(("groups", "groups_degenerate", "stale_groups", "empty_groups", "rollouts_untrained", "tokens_trained"), 2)
    stats = {**counts, "reward_ci": 0.1, "pass_rate": 1.0, "outcomes": {}, "staleness_mean": 0.5, "staleness_max": 1}
    stats |= {"staleness_tokens": {"0": 1, "1": 1}, "held_s": 3.0, "calls_exact": 1, "calls_forked": 0}
    events = [
        {"kind": "weights", "step": step, "version": f"1.{step}", "path": "w", "restored": None, "stats": stats, "metrics": metrics}
        for step, metrics in enumerate((None, {"wait_s": 1e9, "train_s": 1.0}))
    ]
    subject = driver(tmp_path, events, EndedTrainer(), rollouts={"max_in_flight": 4})
    parts: Any = subject
    rows, warnings = [], []
    parts._client.status = status
    parts._report._metrics.append, parts._progress.warn = rows.append, warnings.append
    subject._slots.set(4, time.monotonic())
    await subject.first_weights()
    while not rows:
        await asyncio.sleep(0.01)
    row = rows[0]
    assert (row.trainer_idle_share, row.held_s, row.staleness_tokens) == (1.0, 3.0, {"0": 1, "1": 1})
    assert row.slot_idle_share < 1.0, "the places were taken from some point on"
    assert "replica slow was too slow" in warnings[0]


async def test_an_evaluation_is_a_line_of_metrics_and_is_made_again_at_another_end(tmp_path: Path) -> None:
    made: list[str] = []
    reward = 0.0

    async def run_all(requests: list[Any], limit: int) -> Any:
        for request in requests:
            attempt = sum(name.rpartition(".")[0] == request.key for name in made)  # as a pool takes the next free one
            record = make_record(f"{request.key}.{attempt}", reward, group=None, key=request.key, purpose="eval", attempt=attempt)
            record = record.model_copy(update={"task_name": request.task_name, "harness": request.harness, "started": time.time()})
            made.append(record.id)
            (run.rollouts / record.id).mkdir()
            (run.rollouts / record.id / "result.json").write_text(record.model_dump_json())
            yield record

    harnesses = [{"name": "react"}, {"name": "codex"}]
    subject = driver(tmp_path, [], EndedTrainer(), harnesses=harnesses, eval={"samples": 2})
    parts: Any = subject
    run = subject.run
    parts._heldout = [TaskRef(name, f"/{name}") for name in ("a", "b")]
    parts._dispatch, parts._progress = SimpleNamespace(run_all=run_all), SimpleNamespace(evaluation=lambda *_: None)
    with MetricsWriter(run.metrics) as parts._report._metrics:
        for version, now in ((2, 0.0), (2, 0.0), (4, 1.0)):
            subject.version, reward = version, now
            await subject.evaluate("after")
    assert len(made) == 16, "once for each end, though it was asked for twice at the first"
    rows = [row for row in read_rows(run.metrics) if row["event"] == "eval"]
    assert [(row["step"], row["pass_at_1"], row["rollouts"], row["unrated"]) for row in rows] == [(2, 0, 8, 0), (2, 0, 8, 0), (4, 1, 8, 0)]
    assert {name: part["rollouts"] for name, part in rows[0]["harnesses"].items()} == {"react": 4, "codex": 4}, "a curve of each"
    assert evaluation_points(run, evaluations(read_records(run)))[0][0] == 4, "the newest line of a label counts"
    assert {record.reward for record in evaluations(read_records(run))["after"]} == {1.0}


async def test_what_the_workers_raise_on_purpose_ends_the_run_with_their_words(tmp_path: Path) -> None:
    subject = driver(tmp_path, [{"kind": "failed", "error": "step 3: mean |rollout - trainer logprob| is 0.2"}], EndedTrainer())
    with pytest.raises(RunFailed, match="step 3"):
        await asyncio.wait_for(subject.first_weights(), 60)


async def test_workers_that_gave_up_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="lost"):
        await asyncio.wait_for(driver(tmp_path, [], EndedTrainer("lost")).first_weights(), 60)


async def test_replicas_are_not_dragged_back_by_a_worker_group_that_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    async def sync(_: Any, run: RunDir, path: str, version: str, settings: Any, *, node: str | None) -> dict[str, Any]:
        synced.append(version)
        return {"replaced": []}

    monkeypatch.setattr("forge_ray.train_loop.weight_sync.sync", sync)
    blank = {"kind": "weights", "path": "w", "metrics": None, "restored": None, "stats": None}
    labels = ["1.0", "1.1", "1.2", "2.1", "2.2", "2.3"]
    events = [{**blank, "step": int(label[2:]), "version": label} for label in labels]
    subject = driver(tmp_path, events, EndedTrainer())
    await subject.first_weights()
    while subject.version != 3:
        await asyncio.sleep(0.01)
    assert synced == ["1.0", "1.1", "1.2", "2.2", "2.3"]


async def test_a_run_that_nothing_would_wake_up_ends_and_says_why(tmp_path: Path) -> None:
    # Two whole groups of four as an older run left them, and a config that asks for groups of two: no room and nothing to come.
    subject = driver(tmp_path, [], EndedTrainer(), train={"group_size": 2, "groups_per_step": 4, "max_staleness": 0})
    for group in range(2):
        for slot in range(4):
            record = make_record(f"g{group:05d}-{slot}.0", float(slot), group=group)
            (subject.run.rollouts / record.id).mkdir()
            (subject.run.rollouts / record.id / "result.json").write_text(record.model_dump_json())
    subject.restore()
    subject.version = 0
    with pytest.raises(RunFailed, match=r"step 0 cannot be filled: 2 of its 4 groups are ready, nothing runs"):
        await asyncio.wait_for(subject.learn(), 60)


async def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    subject = driver(tmp_path, [], EndedTrainer())
    file = subject.run.rollouts / "g00000-0.0" / "result.json"
    file.parent.mkdir()
    for broken in (b"", b'{"id": "g000', b"\xff\x00", b"[" * 100_000):
        file.write_bytes(broken)
        with pytest.raises(RunDamaged, match=f"{file} is damaged .*remove it"):
            subject.restore()
    file.unlink()
    batch = subject.run.data / "samples/step=0/batch.parquet"
    batch.parent.mkdir(parents=True)
    batch.write_bytes(b"PAR1 and no more")
    with pytest.raises(StoreError, match=r"step=0/batch.parquet holds no samples"):
        driver(tmp_path, [], EndedTrainer()).restore()


def test_one_outage_with_everything_in_flight_is_no_reason_to_stop(tmp_path: Path) -> None:
    subject = driver(tmp_path, [], EndedTrainer(), rollouts={"max_in_flight": 32})
    for number in range(64):
        subject._watch(make_record(f"g00000-{number}.0", None))
    with pytest.raises(RunFailed, match="none of the last 65 rollouts can be used"):
        subject._watch(make_record("g00000-64.0", None))


def test_recordings_read_from_many_threads_hold_every_call_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()

    async def write() -> None:
        writer = CallLogWriter(run.calls / "r.jsonl")
        draw = random.Random(0)
        for session in range(8):
            for number in range(40):
                call = f"{session}-{number}"
                opened = {
                    "event": "open",
                    "call": call,
                    "session": f"s{session}",
                    "purpose": "train",
                    "replica": "r",
                    "t": 1.0,
                    "dialect": "chat",
                    "path": "/v1",
                    "streamed": False,
                    "kind": "agent",
                    "conversation": call,
                    "request_sha256": call,
                    "parent": None,
                    "shared": 0,
                    "new": [draw.randrange(9) for _ in range(50)],
                    "sampling": {"temperature": 1.0},
                    "masked_by_grammar": False,
                    "max_tokens": 5,
                    "version": "1.0",
                }
                ended = {
                    "event": "finished",
                    "call": call,
                    "t": 2.0 + number,
                    "ids": [1],
                    "logprobs": [-1.0],
                    "spans": [["1.0", 0, 1]],
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "version": "1.0",
                    "error": None,
                }
                await writer.append(opened)
                await writer.append(ended)
        writer.close()

    asyncio.run(write())
    for _ in range(5):
        recordings, found = Recordings(run), []
        records = [make_record(f"s{session}", 1.0) for session in range(8)]
        threads = [threading.Thread(target=lambda: found.append(recordings.with_calls(records))) for _ in range(8)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for taken in found:
            assert [len({call.id for call in calls}) for _, calls in taken] == [len(calls) for _, calls in taken] == [40] * 8
    recordings.done(records)
    assert [len(calls) for _, calls in recordings.with_calls(records)] == [0] * 8


def test_a_call_that_stands_twice_in_a_rollout_is_refused() -> None:
    call = make_call([1, 2], [3])
    train = config().train
    with pytest.raises(BatchError, match="twice"):
        build_step([[(make_record("g00000-0.0", 1.0), [call, call])]], train)


async def test_a_step_replaces_groups_that_say_nothing_and_a_restart_knows_them(tmp_path: Path) -> None:
    train = {"group_size": 2, "groups_per_step": 1, "dynamic_sampling": True, "max_resampled_groups": 1, "steps": 9}

    def begun(rewards: list[list[float]]) -> Driver:
        subject = driver(tmp_path, [], EndedTrainer(), train=train)
        names = [(f"g{group:05d}-{slot}.0", reward, group) for group, some in enumerate(rewards) for slot, reward in enumerate(some)]
        new = [name for name in names if not (subject.run.rollouts / name[0]).exists()]
        store(subject.run, [(make_record(name, reward, group=group), [make_call([1], [2], session=name)]) for name, reward, group in new])
        subject.restore()
        return subject

    subject = await asyncio.to_thread(begun, [[1.0, 1.0], [0.0, 0.0]])
    for group in subject._flow.scheduler.ready():
        await subject._batches.build(group)
    silent = await asyncio.to_thread(begun, [[1.0, 1.0], [0.0, 0.0]])
    assert await subject._batches._form(0) == (True, True), "one is replaced, then the bound is reached and the step takes what there is"
    stats = subject._batches.stats(0)
    assert (stats["resampled"], stats["resampled_groups"], stats["taken"], stats["groups_degenerate"]) == ([0], 1, [1], 1)
    assert len(silent._flow.scheduler.ready()) == 2, "before the batch was on disk nothing was replaced for good"
    again = await asyncio.to_thread(begun, [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    scheduler = again._flow.scheduler
    assert (scheduler.resampled_groups, scheduler.accepted, scheduler.claimed) == (1, 4, 2)
    assert [group.index for group in scheduler.ready()] == [2]
    await again._batches.build(scheduler.ready()[0])
    assert await again._batches._form(1) == (True, False)
    assert again._batches.stats(1)["resampled_groups"] == 0 and again._batches.stats(1)["tokens_trained"] == 2


def test_rollouts_that_are_rated_and_never_trained_end_the_run_too(tmp_path: Path) -> None:
    subject = driver(tmp_path, [], EndedTrainer(), rollouts={"preset": "paper", "max_in_flight": 4})
    with pytest.raises(RunFailed, match="none of the last 24 rollouts can be used"):
        for number in range(24):
            subject._watch(make_record(f"g00000-{number}.0", 1.0, outcome="truncated"))
