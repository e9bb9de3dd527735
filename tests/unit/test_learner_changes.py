"""A run that goes on under another config than it was trained with so far: what it takes up, what it notes, what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from forge_ray.run_dir import RunDir
from forge_ray.train_loop import checkpoint, recipe
from forge_ray.train_loop.learner import Learner
from forge_ray.train_loop.rows import Rows
from forge_ray.train_loop.strategies.ddp import Replicated
from tests.unit import learning

AT, STEPS = 2, 5
BEFORE: dict[str, Any] = {"optimizer": {"lr": 1e-2}}


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[Rows]]:
    """Five steps with a checkpoint after two, and their batches: of the rollouts one has tokens of the version before, as they do."""
    learner = learning.learner_of(learning.config(steps=STEPS, **BEFORE), learning.with_model(tmp_path))
    batches: list[Rows] = []
    for step in range(STEPS):
        rows = learning.sampled(learner, learning.rollouts(step))
        stored = learner.run.data / "samples" / f"step={step}" / "batch.parquet"
        stored.parent.mkdir(parents=True)
        stored.touch()
        batches.append(copy.deepcopy(rows))
        learner.train(rows)
        if learner.step == AT:
            learner.save(None)
    return tmp_path, batches


def going_on(folder: Path, **train: Any) -> tuple[Learner, list[str]]:
    notes: list[str] = []
    settings = learning.config(**{"steps": STEPS, **train})
    return learning.learner_of(settings, folder, tell=lambda event: notes.append(str(event.get("text")))), notes


def test_another_rate_is_taken_up_and_what_the_old_one_sampled_is_trained_unchecked(run: tuple[Path, list[Rows]]) -> None:
    folder, batches = run
    learner, notes = going_on(folder, optimizer={"lr": 1e-3, "betas": [0.5, 0.6], "weight_decay": 0.1, "microbatch_tokens": 50})
    told = [note for note in notes if "another config" in note]
    assert len(told) == 1 and "train.optimizer.lr was 0.01 and is 0.001; " in told[0] and "microbatch_tokens" not in told[0]
    assert isinstance(learner.strategy, Replicated)
    assert all(group["betas"] == (0.5, 0.6) and group["weight_decay"] == 0.1 for group in learner.strategy.optimizer.param_groups)
    seen = [learner.train(batches[step]) for step in range(AT, STEPS)]
    assert [step["lr"] for step in seen] == [1e-3] * 3
    assert [step["checked_tokens"] for step in seen] == [25, 0, 0], "the checkpoint's weights are those of then, later ones are not"
    learner.save(None)
    again, notes = going_on(folder, optimizer={"lr": 1e-3, "betas": [0.5, 0.6], "weight_decay": 0.1})
    assert not [note for note in notes if "another config" in note]
    fresh = again.train(learning.sampled(again, learning.rollouts(9)))
    assert fresh["checked_tokens"] == 0, "version 5 had been served before, with other weights"
    assert again.train(learning.sampled(again, learning.rollouts(10)))["checked_tokens"] == 25


def test_what_was_not_known_is_known_again_only_after_the_last_of_those_versions(run: tuple[Path, list[Rows]]) -> None:
    folder, batches = run
    learner, _ = going_on(folder, optimizer={"lr": 1e-3})
    learner.train(batches[AT])
    learner.save(None)
    again, _ = going_on(folder, optimizer={"lr": 1e-3})
    assert again.step == 3
    assert [again.train(batches[step])["checked_tokens"] for step in (3, 4)] == [0, 0]


def test_the_same_config_checks_everything(run: tuple[Path, list[Rows]]) -> None:
    folder, batches = run
    learner, notes = going_on(folder, **BEFORE)
    assert not [note for note in notes if "another config" in note]
    assert [learner.train(batches[step])["checked_tokens"] for step in range(AT, STEPS)] == [25] * 3


def test_more_steps_are_another_recipe_only_where_the_rate_follows_from_them() -> None:
    then = recipe.of(learning.config(steps=4))
    assert recipe.changes(then, learning.config(steps=8)) == []
    falling = {"lr": 1e-3, "lr_end": 1e-4}
    then = recipe.of(learning.config(steps=4, optimizer=falling))
    assert recipe.changes(then, learning.config(steps=8, optimizer=falling)) == ["train.steps was 4 and is 8"]


def test_what_cannot_go_on_is_refused_by_its_key(run: tuple[Path, list[Rows]]) -> None:
    folder, _ = run
    with pytest.raises(checkpoint.CheckpointError, match=r"step-000002 was written with train\.lora = None, now it is \{.rank.: 4"):
        going_on(folder, **BEFORE, lora={"rank": 4})
    with pytest.raises(checkpoint.CheckpointError, match=r"train\.strategy = ddp, now it is deepspeed-2"):
        pytest.importorskip("deepspeed")
        going_on(folder, **BEFORE, strategy="deepspeed")
    with pytest.raises(checkpoint.CheckpointError, match=r"train\.workers = 1, now it is 2"):
        learning.learner_of(learning.config(**BEFORE), folder, learning.Ranks(world=2))
    checkpoint.prune(RunDir(folder / "run"), 1, upto=AT)
    with pytest.raises(checkpoint.CheckpointError, match=r"train\.loss\.kl = 0\.1 needs the policy before .*step-000000 is gone"):
        going_on(folder, **BEFORE, loss={"kl": 0.1})
