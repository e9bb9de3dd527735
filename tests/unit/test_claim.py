"""Which attempt a request runs: stored results are given back, interrupted attempts are passed over."""

from __future__ import annotations

from pathlib import Path

from forge_ray.actors.attempt import result_file
from forge_ray.actors.rollout_pool import claim
from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRecord, RolloutRequest
from forge_ray.run_dir import RunDir

REQUEST = RolloutRequest(key="g00001-0", purpose="train", task="/t", task_name="t", harness="react", group=1)


def store(run: RunDir, attempt: int) -> RolloutRecord:
    fields = REQUEST.model_dump(exclude={"attempt"})
    record = RolloutRecord(id=f"g00001-0.{attempt}", attempt=attempt, outcome=Outcome.OK, detail="", reward=1.0, **fields)
    result_file(run, record.id).write_text(record.model_dump_json())
    return record


def test_a_request_that_arrives_again_gets_the_same_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    assert claim(run, REQUEST) == (None, 0, [])
    record = store(run, 0)
    assert claim(run, REQUEST) == (record, 0, [])
    assert claim(run, REQUEST.model_copy(update={"attempt": 1})) == (None, 1, [])  # asked for anew on purpose


def test_interrupted_attempts_are_passed_over_and_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    assert [claim(run, REQUEST)[1:] for _ in range(3)] == [(0, []), (1, [0]), (2, [0, 1])]
    record = store(run, 1)
    assert claim(run, REQUEST) == (record, 1, [0])


def test_a_torn_result_is_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    claim(run, REQUEST)
    (run.rollouts / "g00001-0.0" / ".result.json.x").write_text("{")  # what a crash in the middle of writing leaves
    assert claim(run, REQUEST) == (None, 1, [0])
