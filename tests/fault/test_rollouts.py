"""Harnesses, verifiers, engines and pools that fail: each ends in its own outcome, and nothing finished is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRecord
from forge_ray.tasks.digest import image_digest, task_digest
from forge_ray.tasks.task import load_task
from tests.bench import ANSWER_IS_42, Workbench, call, workbench, write_task

pytestmark = pytest.mark.timeout(900)

PROGRAMS = str(Path(__file__).with_name("programs.py"))
OWN = ["Good", "CrashesFirst", "CrashesLater", "NeverCalls", "Hangs", "Daemon", "Waits"]
SCRIPT: list[dict[str, Any]] = [
    {"if": "the engine fails", "say": "half an answer and then nothing", "fault": "fail", "after": 3},
    {"if": "never stop", "say": call("bash", command="echo again")},
    {"if": "talk at length", "say": "words " * 400},
    {"if": "fill the window", "say": call("bash", command="head -c 400000 /dev/zero | tr '\\0' 'x'; echo 42 > answer.txt")},
    {"if": "write 42", "turn": 0, "say": call("bash", command="echo 42 > answer.txt")},
]


def own(name: str) -> str:
    return f"{PROGRAMS}:{name}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    react = {"name": "react", "options": {"retry_seconds": 1, "output_chars": 400_000}}
    with workbench(
        tmp_path_factory.mktemp("faults"),
        "faults",
        [react, *({"name": own(name)} for name in OWN)],
        SCRIPT,
        proxy={"limits": {"calls": 5}, "max_call_tokens": 300},
        rollouts={"deadline_s": 240, "verifier_timeout_s": 20},
    ) as bench:
        yield bench


@pytest.fixture
def task(bench: Workbench, request: pytest.FixtureRequest) -> Any:
    """Makes a task of this test."""

    def make(instruction: str = "write 42", test: str = ANSWER_IS_42, toml: str = "") -> str:
        return write_task(bench.tasks, f"{request.node.name.replace('[', '-').strip(']')}-{time.monotonic_ns()}", instruction, test, toml)

    return make


def left_of(bench: Workbench, rollout: str) -> list[int]:
    """Living processes that carry the rollout's name or its session token in their command line or environment."""
    marks = (f"/{rollout}/", bench.sessions().issue(rollout, "train"))
    found = []
    for process in psutil.process_iter():
        try:
            if any(mark in text for text in (*process.environ().values(), *process.cmdline()) for mark in marks):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_good_one(bench: Workbench, task: Any) -> None:
    record = bench.rollout(own("Good"), task())
    assert (record.outcome, record.reward, record.calls, record.exit_code) == (Outcome.OK, 1.0, 1, 0), record.detail
    assert {"create", "harness", "close", "archive", "verify", "total"} <= set(record.seconds)
    assert (bench.run.rollouts / "archive" / f"{record.workspace_digest}.tar.gz").is_file()
    assert record.task_digest == task_digest(Path(record.task)) and (record.harness_version or "").startswith("programs.py sha256:")
    assert record.image_digest == image_digest(Path(record.task)) and record.image_base == load_task(record.task).image.base
    stored = (bench.run.rollouts / record.id / "result.json").read_text()
    assert RolloutRecord.model_validate_json(stored) == record


def test_a_wrong_answer_is_reward_zero(bench: Workbench, task: Any) -> None:
    record = bench.rollout("react", task("say anything"))
    assert (record.outcome, record.reward) == (Outcome.OK, 0.0), record.detail


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("CrashesFirst", "never called the model; ended with exit code 1: RuntimeError: no luck"),
        ("CrashesLater", "died of signal 11"),
        ("NeverCalls", "never called the model; exit code 0"),
    ],
)
def test_a_program_that_fails(bench: Workbench, task: Any, program: str, words: str) -> None:
    record = bench.rollout(own(program), task())
    assert record.outcome is Outcome.HARNESS
    assert words in record.detail
    assert record.reward is None and record.rewards == {}


def test_a_hang_is_cut_at_the_deadline_and_verified(bench: Workbench, task: Any) -> None:
    for deadline in (3, 12, 48):  # it must have got as far as its answer, which may take long
        record = bench.rollout(own("Hangs"), task(toml=f"[agent]\ntimeout_sec = {deadline}\n"))
        assert left_of(bench, record.id) == []
        if record.reward:
            break
    assert (record.outcome, record.reward) == (Outcome.TRUNCATED, 1.0), record.detail
    assert f"the task's agent.timeout_sec of {deadline} s" in record.detail and record.exit_code is None


def test_a_daemon_neither_holds_the_rollout_up_nor_outlives_it(bench: Workbench, task: Any) -> None:
    record = bench.rollout(own("Daemon"), task())
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), record.detail
    assert left_of(bench, record.id) == []


def test_an_engine_failure(bench: Workbench, task: Any) -> None:
    record = bench.rollout("react", task("the engine fails"))
    assert (record.outcome, record.reward) == (Outcome.ENGINE, None), record.detail


def test_the_session_s_limit_of_calls(bench: Workbench, task: Any) -> None:
    record = bench.rollout("react", task("never stop"))
    assert (record.outcome, record.reward, record.calls) == (Outcome.TRUNCATED, 0.0, 5), record.detail
    assert "session limit of calls" in record.detail


def test_a_reply_cut_at_its_length(bench: Workbench, task: Any) -> None:
    record = bench.rollout("react", task("talk at length"))
    assert (record.outcome, record.reward, record.sampled_tokens) == (Outcome.TRUNCATED, 0.0, 300), record.detail
    assert "length" in record.detail


def test_a_tool_result_that_fills_the_window(bench: Workbench, task: Any) -> None:
    record = bench.rollout("react", task("fill the window"))
    assert (record.outcome, record.reward, record.calls) == (Outcome.TRUNCATED, 1.0, 1), record.detail
    assert "context window" in record.detail


def test_reward_functions_see_the_recorded_tokens_and_their_failures_are_no_rewards(bench: Workbench, task: Any) -> None:
    def with_function(body: str, test: bool) -> RolloutRecord:
        directory = Path(task(toml='[verifier]\nreward = "judge.py:judge"\ntimeout_sec = 6\n'))
        (directory / "judge.py").write_text(f"def judge(rollout):\n    {body}\n")
        if not test:
            (directory / "tests" / "test.sh").unlink()
        return bench.rollout("react", str(directory))

    body = "return {'reward': float((rollout.workspace / 'answer.txt').read_text()), 'calls': {c.id: len(c.ids) for c in rollout.calls}}"
    record = with_function(body, test=False)
    recorded = bench.calls(record.id)
    assert (record.outcome, record.reward, record.rewards) == (Outcome.OK, 42.0, {"reward": 42.0}), record.detail
    assert record.call_rewards == {call.id: len(call.ids) for call in recorded} and len(recorded) == record.calls > 1
    assert record.ended == Outcome.OK and len(record.reward_digest or "") == 64
    wrong = {"return float('nan')": "is nan", "while True: pass": "killed at its limit of 6 s", "return 1": "reward_weights"}
    for body, words in wrong.items():
        failed = with_function(body, test=body == "return 1")
        assert (failed.outcome, failed.reward, failed.rewards) == (Outcome.VERIFIER, None, {}) and words in failed.detail, failed.detail


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("exit 1", "neither reward.json nor reward.txt"),
        ("kill -SEGV $$", "ended before its time"),
        ("echo nan > ${VERIFIER_DIR:-/logs/verifier}/reward.txt", "nan"),
        ("echo yes > ${VERIFIER_DIR:-/logs/verifier}/reward.txt", "not one number"),
        ("echo 1 > ${VERIFIER_DIR:-/logs/verifier}/reward.txt; sleep 600", "limit is 2 s"),
    ],
    ids=["exits", "crashes", "nan", "malformed", "hangs"],
)
def test_a_verifier_without_a_reward_is_never_reward_zero(bench: Workbench, task: Any, test: str, words: str) -> None:
    record = bench.rollout(own("Good"), task(test=test, toml="[verifier]\ntimeout_sec = 2\n" if "sleep" in test else ""))
    assert (record.outcome, record.reward, record.rewards) == (Outcome.VERIFIER, None, {}), record.detail
    assert words in record.detail


def test_a_broken_task(bench: Workbench, task: Any) -> None:
    path = Path(task())
    (path / "tests" / "test.sh").unlink()
    record = bench.rollout(own("Good"), str(path))
    assert record.outcome is Outcome.TASK and "test.sh is missing" in record.detail.replace(": is", " is")


def test_a_cancelled_rollout_leaves_nothing_and_can_be_asked_for_again(bench: Workbench, task: Any) -> None:
    import ray
    from ray.exceptions import RayTaskError

    from forge_ray.actors.rollout_pool import RolloutCancelled

    request = bench.request(own("Waits"), task(f"write 42 {bench.tasks / 'gate-cancel'}"))
    answer = bench.start(request)
    wait_for_call(bench, f"{request.key}.0")
    assert left_of(bench, f"{request.key}.0")
    assert ray.get(bench.pool.cancel.remote([request.key]), timeout=120) == 1
    with pytest.raises(RayTaskError) as error:
        ray.get(answer, timeout=120)
    assert isinstance(error.value.cause, RolloutCancelled)
    assert left_of(bench, f"{request.key}.0") == []
    assert not (bench.run.rollouts / f"{request.key}.0" / "result.json").exists()
    (bench.tasks / "gate-cancel").touch()
    record = RolloutRecord.model_validate_json(ray.get(bench.start(request), timeout=600))
    assert (record.outcome, record.id) == (Outcome.OK, f"{request.key}.1"), record.detail


def test_a_killed_pool_loses_nothing(bench: Workbench, task: Any) -> None:
    import ray

    done = bench.rollout(own("Good"), task())
    gate = bench.tasks / "gate-kill"
    request = bench.request(own("Waits"), task(f"write 42 {gate}"))
    answer = bench.start(request)
    wait_for_call(bench, f"{request.key}.0")
    before = bench.status()
    assert list(before["running"]) == [request.key]
    assert left_of(bench, f"{request.key}.0")
    os.kill(before["pid"], signal.SIGKILL)
    # The same call of ours is answered by the next life, with an attempt of its own.
    wait_for_call(bench, f"{request.key}.1")
    assert left_of(bench, f"{request.key}.0") == []
    gate.touch()
    record = RolloutRecord.model_validate_json(ray.get(answer, timeout=600))
    assert (record.outcome, record.reward, record.id) == (Outcome.OK, 1.0, f"{request.key}.1"), record.detail
    after = bench.status()
    assert after["pid"] != before["pid"] and after["running"] == {} and after["cleared"] == 1
    # Asked again, both are given back as they stand, without a run.
    for known in (record, done):
        again = request.model_copy(update={"key": known.key, "harness": known.harness, "task": known.task})
        assert RolloutRecord.model_validate_json(ray.get(bench.start(again), timeout=120)) == known
    assert bench.status()["finished"] == after["finished"]
    # The interrupted attempt's session takes no more calls.
    assert closed(bench, f"{request.key}.0")


def wait_for_call(bench: Workbench, session: str) -> None:
    """Until the session has a finished call."""
    deadline = time.monotonic() + 300
    while not any(c.status == "finished" for c in bench.calls(session)):
        assert time.monotonic() < deadline, f"{session} never called"
        time.sleep(0.3)


def closed(bench: Workbench, session: str) -> bool:
    from forge_ray.trajectories.call_log import CallLogReader

    reader = CallLogReader(bench.run.calls)
    reader.refresh()
    return reader.state(session).closed
