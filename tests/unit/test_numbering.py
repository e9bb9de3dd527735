"""A stopped run goes on under the schedule that it began with, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import numbering, state
from forge_ray.job.scheduler import TaskRef
from forge_ray.run_dir import RunDamaged, RunDir, next_incarnation, read_state, write_json

TASKS = [TaskRef(f"t{number}", f"/t{number}") for number in range(3)]


def config(**sections: Any) -> Config:
    tree = {
        "name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "a"}],
        "tasks": {"train": {"path": "t.py:make", "options": {"count": 3}}, "heldout": "h"},
    }  # fmt: skip
    return Config.model_validate({**tree, **sections})


def found(refs: list[TaskRef] = TASKS, /, **sections: Any) -> numbering.Numbering:
    return numbering.of_config(config(**sections)) | numbering.of_tasks(refs, TASKS[:1])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has made one rollout."""
    run = RunDir(tmp_path / "run").create()
    write_json(run.state, {"incarnation": 0, "secret": "ab"})
    numbering.keep(run, found())
    (run.rollouts / "g00000-0.0").mkdir()
    (run.rollouts / "g00000-0.0" / "result.json").write_text("{}")
    return run


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (found(seed=7), "seed was 0 and is 7"),
        (found(harnesses=[{"name": "b"}]), "harnesses has lost 'a' and got 'b'"),
        (found(harnesses=[{"name": "a"}, {"name": "b"}]), "harnesses has got 'b'"),
        (found(train={"group_size": 4}), "train.group_size was 8 and is 4"),
        (found(train={"groups_per_step": 2}), "train.groups_per_step was 8 and is 2"),
        (found([*TASKS, TaskRef("t9", "/t9")]), "tasks.train has got 't9'"),
        (found(TASKS[:1]), "tasks.train has lost 't1' and 1 more"),
        (found([TASKS[0], TASKS[2], TASKS[1]]), "tasks.train has another order"),
        (found(tasks={"train": {"path": "t.py:make", "options": {"count": 4}}, "heldout": "h"}), "tasks.train.options was {'count': 3}"),
    ],
)
def test_what_has_changed_is_named(run: RunDir, changed: numbering.Numbering, words: str) -> None:
    with pytest.raises(UserError, match=f"(?s){run.root}: {words}.*since the run began") as caught:
        numbering.keep(run, changed)
    assert "\n" not in str(caught.value)
    assert numbering.keep(run, found()) is None, "the old one still stands"


def test_the_config_alone_is_compared_before_anything_starts(run: RunDir) -> None:
    numbering.check(run, numbering.of_config(config()))
    with pytest.raises(UserError, match="seed"):
        numbering.check(run, numbering.of_config(config(seed=1)))


def test_what_no_rollout_depends_on_may_change(run: RunDir) -> None:
    moved = [TaskRef(task.name, f"/elsewhere/{task.name}") for task in TASKS]
    numbering.keep(run, found(moved, train={"steps": 500, "workers": 2}, rollouts={"retries": 0}))


def test_a_run_that_has_made_nothing_yet_may_change_and_an_old_run_is_taken_as_it_is(run: RunDir) -> None:
    (run.rollouts / "g00000-0.0" / "result.json").rename(run.root / "away")
    numbering.keep(run, found(seed=7))
    assert read_state(run)[numbering.KEY]["seed"] == 7
    (run.root / "away").rename(run.rollouts / "g00000-0.0" / "result.json")
    write_json(run.state, {"incarnation": 3, "secret": "ab"})  # from before there was a schedule in it
    numbering.keep(run, found(seed=9))
    with pytest.raises(UserError, match="seed was 9"):
        numbering.keep(run, found())


def test_the_schedule_and_the_incarnation_live_in_one_file(run: RunDir) -> None:
    assert next_incarnation(run) == 1
    numbering.keep(run, found())
    assert read_state(run)["incarnation"] == 1 and read_state(run)["secret"] == "ab"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"incarnation": 1}', '{"incarnation": 1, "secret": "zz"}', "[" * 100_000, "\x00"])
def test_a_damaged_state_is_named(run: RunDir, text: str) -> None:
    run.state.write_text(text)
    with pytest.raises(RunDamaged, match=f"{run.state} is damaged"):
        read_state(run)


def test_a_refused_run_leaves_a_directory_only_where_it_holds_something(tmp_path: Path) -> None:
    plain = config(name="new").model_copy(update={"runs": str(tmp_path / "runs")})
    run = state.create(plain)
    (run.inputs / "model").mkdir()
    state.discard(run)
    assert not run.root.exists()
    for kept in ("rollouts/a.0/result.json", "checkpoints/step-000000/config.json", "data/samples/step=0/batch.parquet"):
        run = state.create(plain.model_copy(update={"name": f"kept-{kept[:3]}"}))
        file = run.root / kept
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        state.discard(run)
        assert file.exists()
    old = RunDir(tmp_path / "old").create()
    state.discard(old)
    assert old.root.exists(), "another process made it"
    (tmp_path / "runs" / "mine").mkdir()
    run = state.create(plain.model_copy(update={"name": "mine"}))
    state.discard(run)
    assert run.root.exists(), "the directory was there before"
