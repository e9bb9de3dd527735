"""SIGKILL at any moment, most of all inside a save: whoever goes on makes the steps that a run makes that nobody kills."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from tests.unit import learning

STEPS = 6
KILLS = 8


def settings(**own: Any) -> Any:
    return learning.config(steps=STEPS, optimizer={"lr": 1e-2, "lr_end": 1e-3, "epochs": 2, "minibatches": 2}, **own)


def in_child(work: Callable[[], None]) -> int:
    """`work` in a forked process; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def straight(folder: Path, own: dict[str, Any]) -> None:
    """All steps at one go; keeps the rollouts."""
    learner = learning.learner_of(settings(**own), learning.with_model(folder))
    batches = []
    for step in range(STEPS):
        batch = learning.sampled(learner, learning.rollouts(step))
        batches.append(copy.deepcopy(batch))
        note(folder, learner, learner.train(batch))
    (folder / "rollouts.pickle").write_bytes(pickle.dumps(batches))


def note(folder: Path, learner: Any, metrics: dict[str, Any]) -> None:
    """One line per step: number, loss, rate, norm, and a digest of weights and moments."""
    moments = [value for entry in learner.strategy.optimizer.state.values() for value in entry.values()]
    state = [float(value.double().abs().sum()) for value in (*learner.strategy.own(), *moments)]
    with (folder / "steps.jsonl").open("a") as file:
        print(json.dumps([learner.step, metrics["loss"], metrics["lr"], metrics["grad_norm"], state]), file=file)


def going_on(folder: Path, rollouts: Path, own: dict[str, Any], killed_at: int | None) -> None:
    """From the newest checkpoint to the end, a checkpoint per step; dies at its `killed_at`th write to the disk."""
    writes = 0

    def dying(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    os.fsync, os.replace, torch.save, shutil.rmtree = dying(os.fsync), dying(os.replace), dying(torch.save), dying(shutil.rmtree)
    learner = learning.learner_of(settings(**own), folder)
    batches = pickle.loads(rollouts.read_bytes())
    while learner.step < STEPS:
        note(folder, learner, learner.train(batches[learner.step]))
        learner.save(None)


def story(_: int, folder: str, own: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    learning.import_all()  # once, not in each child
    if "strategy" in own:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401
    place = Path(folder)
    (place / "straight").mkdir()
    assert in_child(lambda: straight(place / "straight", own)) == 0
    (place / "killed").mkdir()
    assert in_child(lambda: learning.with_model(place / "killed") and None) == 0
    draw = random.Random(0)
    rollouts = place / "straight" / "rollouts.pickle"
    for _kill in range(KILLS):
        at = draw.randrange(1, 45)
        code = in_child(lambda at=at: going_on(place / "killed", rollouts, own, at))
        assert code in (0, -signal.SIGKILL), code
    assert in_child(lambda: going_on(place / "killed", rollouts, own, None)) == 0


@pytest.mark.parametrize(
    "own", [{}, {"lora": {"rank": 4}}, {"strategy": "deepspeed", "deepspeed": {"zero": 3}}], ids=["all weights", "adapters", "zero-3"]
)
def test_whoever_goes_on_after_a_kill_makes_the_same_steps(tmp_path: Path, own: dict[str, Any]) -> None:
    start_processes(story, args=(str(tmp_path), own), nprocs=1, start_method="spawn")
    expected = [json.loads(line) for line in (tmp_path / "straight" / "steps.jsonl").read_text().splitlines()]
    made = [json.loads(line) for line in (tmp_path / "killed" / "steps.jsonl").read_text().splitlines()]
    assert [step[0] for step in expected] == list(range(1, STEPS + 1))
    assert {step[0] for step in made} == set(range(1, STEPS + 1))
    assert len(made) > STEPS, "no step was lost to a kill: nothing was tried"
    for step in made:
        assert step == expected[step[0] - 1]
    assert not list((tmp_path / "killed" / "run" / "checkpoints").glob(".*")), "what was cut off is cleared away"
    before = 0
    for step in made:
        assert step[0] <= before + 1, "no step is skipped"
        before = step[0]
