"""Reward functions: in a process of their own, with a deadline; named numbers become one; whatever is no number is a typed error."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.reference import missing, parse
from forge_ray.rewards.call import Question, RewardFunctionFailed, Scored, score
from forge_ray.rewards.combine import RewardTwice, RewardUnnamed, combine
from forge_ray.rewards.plan import function_of, refuse
from forge_ray.run_dir import RunDir
from forge_ray.sandboxes import processes
from forge_ray.tasks.task import load_task
from forge_ray.tasks.verifier import RewardAmbiguous, Rewards, RewardTooLarge, VerifierError, VerifierTimeout
from tests.stored_run import archived, store, stored_run
from tests.task_maker import make_task
from tests.unit.making import make_call, make_record

ROLLOUT = "g00000-0.0"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = stored_run(tmp_path / "run")
    calls = [make_call([1, 2], [3, 4]), make_call([1, 2, 3, 4, 5], [6], order=1), make_call([7], [8], order=2, kind="aux")]
    store(run, [(make_record(ROLLOUT, 1.0), calls)])
    return run


@pytest.fixture
def ask(run: RunDir, tmp_path: Path) -> Callable[..., Scored]:
    """Calls function `f` of a module with this source about the stored rollout."""

    def call(source: str, *, timeout_s: float = 60, name: str = "own/judge.py", rewards: dict[str, float] | None = None) -> Scored:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        archive = str(run.rollouts / "archive" / f"{archived(run, {'answer.txt': '42', 'caf.d/x': 'y'})}.tar.gz")
        (tmp_path / "tmp").mkdir(exist_ok=True)
        question = Question(f"{file}:f", str(run.root), ROLLOUT, archive, "t0", "/tasks/t0", "react", "ok", rewards or {})
        log, within = tmp_path / "reward.log", str(tmp_path / "tmp")
        work = score(parse(question.function, tmp_path, "x"), question, timeout_s=timeout_s, log=log, log_bytes=4096, within=within)
        try:
            return asyncio.run(work)
        finally:
            assert os.listdir(tmp_path / "tmp") == [], "nothing is left of the workspace's copy"

    return call


def test_a_function_sees_tokens_text_the_workspace_and_the_verdict(ask: Callable[..., Scored]) -> None:
    scored = ask(
        "def f(rollout):\n"
        "    assert rollout.rewards == {'reward': 0.5} and rollout.outcome == 'ok' and rollout.task == 't0'\n"
        "    print('looking at', rollout.id)\n"
        "    first, second, aux = rollout.calls\n"
        "    assert (first.ids, first.prompt_ids, first.logprobs) == ([3, 4], [1, 2], [-1, -1.0625])\n"
        "    assert (first.kind, aux.kind) == ('agent', 'aux')\n"
        "    assert rollout.final_text == second.text != '' and first.prompt\n"
        "    (rollout.workspace / 'answer.txt').rename(rollout.workspace / 'moved')\n"
        "    text = (rollout.workspace / 'moved').read_text()\n"
        "    return {'right': text == '42', 'tokens': len(first.ids), 'calls': {second.id: 0.25, '-1': 1}}\n",
        rewards={"reward": 0.5},
    )
    assert scored.rewards == {"right": 1.0, "tokens": 2.0} and scored.calls == {"g00000-0.0/001": 0.25, "-1": 1.0}


def test_the_final_text_is_one_that_the_harness_got(run: RunDir, ask: Callable[..., Scored]) -> None:
    lost = make_call([1], [9], order=3, delivered=False)
    source = "def f(rollout):\n    assert rollout.final_text == rollout.calls[1].text\n    return len(rollout.calls)\n"
    store(run, [(make_record(ROLLOUT, 1.0), [lost])])
    assert ask(source).rewards == {"f": 4.0}


def test_a_plain_number_has_the_functions_name_and_numpys_are_numbers(ask: Callable[..., Scored]) -> None:
    source = "import numpy\ndef f(rollout): return {'a': numpy.float32(0.5), 'b': numpy.ones(2).mean() > 0.5, 'c': numpy.array(7)}"
    assert ask(source).rewards == {"a": 0.5, "b": 1.0, "c": 7.0}
    assert ask("import numpy\ndef f(rollout): return numpy.int64(3)").rewards == {"f": 3.0}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(rollout): return None", "what it returned is None and not a number"),
        ("def f(rollout): return '1'", "what it returned is '1' and not a number"),
        ("def f(rollout): return float('nan')", "what it returned is nan"),
        ("def f(rollout): return {'a': 1, 'b': float('-inf')}", "'b' is -inf"),
        ("def f(rollout): return {'a': [1]}", r"'a' is \[1\] and not a number"),
        ("import numpy\ndef f(rollout): return numpy.array([1.0])", "is array.* and not a number"),
        ("async def f(rollout): return 1", "is <coroutine object f .* and not a number"),
        ("def f(rollout): return {}", "it returned no reward"),
        ("def f(rollout): return {1: 1}", "the name 1 is no text"),
        ("def f(rollout): return {'a': 1, 'calls': {'0': 'x'}}", r"calls\['0'\] is 'x' and not a number"),
        ("def f(rollout): return 10 ** 400", "very large integer"),
        ("def f(rollout): return 1e13", r"beyond 1e\+12"),
        ("def f(rollout): raise ValueError('no\\nluck')", "ValueError: no luck"),
        ("def f(): return 1", "TypeError: f.. takes 0 positional arguments"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def g(rollout): return 1", "there is no function 'f'; there is g"),
        ("import sys\ndef f(rollout): sys.exit(0)", "SystemExit: 0"),
        ("import os, signal\ndef f(rollout):\n  print('last words')\n  os.kill(os.getpid(), signal.SIGKILL)", "died: last words"),
        ("def f(rollout): return {'a' * 2_000_000: 1}", "cannot be read"),
    ],
)
def test_what_is_no_reward_is_one_clear_line(ask: Callable[..., Scored], source: str, words: str) -> None:
    with pytest.raises(RewardFunctionFailed, match=words) as raised:
        ask(source)
    assert "\n" not in str(raised.value) and isinstance(raised.value, VerifierError)


def test_a_function_that_hangs_is_killed_with_what_it_started_and_the_loop_goes_on(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    marker = tmp_path / "child"
    file.write_text(
        "import os, subprocess, time\n"
        f"def f(rollout):\n  child = subprocess.Popen(['sleep', '600'])\n  open({str(marker)!r}, 'w').write(str(child.pid))\n"
        "  print('x' * 100_000)\n  while True: pass\n"
    )
    question = Question(f"{file}:f", str(run.root), ROLLOUT, None, "t0", "/t", "react", "ok")
    turns = 0

    async def main() -> None:
        nonlocal turns
        log = tmp_path / "reward.log"
        work = asyncio.create_task(
            score(parse(question.function, tmp_path, "x"), question, timeout_s=2, log=log, log_bytes=4096, within=str(tmp_path))
        )
        while not work.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(VerifierTimeout, match="was killed at its limit of 2 s"):
            await work

    asyncio.run(main())
    assert turns > 5, "the event loop was free all the time"
    child, end = int(marker.read_text()), time.monotonic() + 60
    while processes.state(child) not in (None, "Z"):  # it is killed, which it may have to hear of yet
        assert time.monotonic() < end
        time.sleep(0.01)
    assert (tmp_path / "reward.log").stat().st_size < 5000


def test_the_digest_is_that_of_the_sources_the_function_consists_of(ask: Callable[..., Scored], tmp_path: Path) -> None:
    helper = tmp_path / "own" / "helper.py"
    helper.parent.mkdir()
    helper.write_text("value = 1")
    source = "import helper\ndef f(rollout): return helper.value"
    first = ask(source).digest
    (tmp_path / "own" / "unused.py").write_text("x = 1")
    assert ask(source).digest == first
    helper.write_text("value = 2")
    assert ask(source).digest not in (first, ask(source + "\n").digest)


def test_a_file_in_a_package_is_imported_as_a_part_of_it(ask: Callable[..., Scored], tmp_path: Path) -> None:
    (tmp_path / "pack" / "deep").mkdir(parents=True)
    for folder in ("pack", "pack/deep"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "pack" / "common.py").write_text("value = 3")
    assert ask("from ..common import value\ndef f(rollout): return value", name="pack/deep/json.py").rewards == {"f": 3.0}
    assert ask("def f(rollout): return 4", name="plain/json.py").rewards == {"f": 4.0}, "a file called like a module of Python's"


def test_references(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "judge.py").write_text("")
    assert str(parse("pack.judge:f", tmp_path, "x")) == f"{tmp_path / 'pack' / 'judge.py'}:f"
    assert str(parse("pack/judge.py:f", tmp_path, "x")) == f"{tmp_path / 'pack' / 'judge.py'}:f"
    assert str(parse("json.decoder:f", tmp_path, "x")) == "json.decoder:f" and missing(parse("json:f", tmp_path, "x")) is None
    assert "no module 'nowhere'" in str(missing(parse("nowhere.at:f", tmp_path, "x")))
    assert "does not exist" in str(missing(parse("no.py:f", tmp_path, "x")))
    for wrong in ("f", "judge.py", "judge.py:", ":f", "a b:f", "judge:f()", "judge:a.b"):
        with pytest.raises(UserError, match=r"package.module:function"):
            parse(wrong, tmp_path, "x")


# ---- several named numbers ----


def test_weights_make_one_number_of_many() -> None:
    weights = {"correct": 1.0, "brevity": 0.1}
    assert combine({"correct": 1, "format": 9}, {"brevity": 0.5}, weights) == Rewards(1.05, {"correct": 1, "format": 9, "brevity": 0.5})
    assert combine({"reward": 0.5, "x": 3}, None, {}).reward == 0.5
    assert combine(None, {"only": 0.25}, {}).reward == 0.25
    assert combine({"a": 1.0, "b": 2.0}, None, {"b": -1.0}).reward == -2.0


@pytest.mark.parametrize(
    ("verifier", "function", "weights", "error", "words"),
    [
        ({"correct": 1.0}, None, {"correct": 1.0, "brevity": 0.1}, RewardUnnamed, "has 'brevity', .* there is 'correct'"),
        ({"reward": 1.0}, {"reward": 1.0}, {"reward": 1.0}, RewardTwice, "both give 'reward'"),
        ({"reward": 1.0}, {"brevity": 1.0}, {}, RewardAmbiguous, "set rollouts.reward_weights"),
        ({"a": 1.0, "b": 1.0}, None, {}, RewardAmbiguous, "'a', 'b'"),
        ({"a": 1e12}, None, {"a": 100.0}, RewardTooLarge, "the weighted reward"),
    ],
)
def test_a_verdict_that_is_not_one_number_is_an_error(verifier: Any, function: Any, weights: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        combine(verifier, function, weights)


def config(tmp_path: Path, **rollouts: Any) -> Config:
    tree = {"name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t"}, "rollouts": rollouts}
    file = tmp_path / "run.yaml"
    import yaml

    file.write_text(yaml.safe_dump(tree))
    return load(file)


def test_the_config_names_a_function_beside_it_and_the_tasks_own_wins(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def f(rollout): return 1")
    rollouts = config(tmp_path, reward="judge:f").rollouts
    assert rollouts.reward == f"{tmp_path / 'judge.py'}:f"
    plain = load_task(make_task(tmp_path / "plain"))
    own = load_task(
        make_task(tmp_path / "own", toml='[verifier]\nreward = "tests/judge.py:g"\n', tests={"judge.py": "def g(rollout): return 1"})
    )
    assert str(function_of(plain, rollouts)) == rollouts.reward and str(function_of(own, rollouts)) == f"{own.tests / 'judge.py'}:g"
    with pytest.raises(UserError, match=r"reward_weights: task plain .* nothing says what each is worth"):
        refuse([plain], rollouts)
    refuse([plain, own], config(tmp_path, reward="judge:f", reward_weights={"reward": 1, "f": 0.1}).rollouts)
    with pytest.raises(UserError, match=r"gone.py does not exist"):
        refuse([plain], config(tmp_path, reward="gone.py:f", reward_weights={"reward": 1}).rollouts)
    with pytest.raises(UserError, match="every weight is 0"):
        config(tmp_path, reward_weights={"a": 0})


def test_a_task_with_a_reward_function_needs_no_test_script(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t", toml='[verifier]\nreward = "judge.py:f"\n', tests={"judge.py": ""})
    (directory / "tests" / "test.sh").unlink()
    task = load_task(directory)
    assert not task.has_test and task.notes == () and task.unsupported(isolation="none") == []
    (directory / "task.toml").write_text('[verifier]\nreward = "judge.py"\n')
    with pytest.raises(UserError, match=r"verifier.reward: 'judge.py' names no function"):
        load_task(directory)
