"""An evaluation's own run directory: begun, and taken up with the plan that it was begun with."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from forge_ray.cli.main import main
from forge_ray.config import Config, Source
from forge_ray.errors import UserError
from forge_ray.job import heldout
from forge_ray.job.runtime import Runtime
from tests.task_maker import make_task
from tests.unit.making import make_record

SIDES = {"train": "train", "heldout": "held"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "name": "x",
            "runs": str(tmp_path),
            "policy": {"model": "/m"},
            "harnesses": [{"name": "react"}],
            "tasks": {"train": "/t", "heldout": "/h"},
        }
    )


def test_it_is_taken_up_as_it_was_begun(config: Config, tmp_path: Path) -> None:
    for checkpoint in (None, tmp_path / "step-000003"):
        config = config.model_copy(update={"name": f"x{checkpoint is None}"})
        begun = heldout.begin(config, checkpoint, 3)
        with pytest.raises(UserError, match="another process is at work"):
            heldout.take_up(begun.directory.root)
        (begun.directory.root / ".lock").unlink()  # as if its process had ended
        assert heldout.take_up(begun.directory.root) == begun
    with pytest.raises(UserError, match="holds no evaluation that was begun"):
        heldout.take_up(tmp_path)


def test_one_that_is_done_is_told_without_anything_being_started(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: Runtime) -> None:
        raise InterruptedError("Ray is started")

    monkeypatch.setattr(Runtime, "connect", start)
    monkeypatch.setattr("forge_ray.job.single.run_log", nullcontext)  # it takes this process's log for its own
    for side in ("train", "held"):
        make_task(tmp_path / "tasks" / side / "t1")
    tasks = config.tasks.model_copy(update={name: Source(path=str(tmp_path / "tasks" / side)) for name, side in SIDES.items()})
    begun = heldout.begin(config.model_copy(update={"tasks": tasks}), None, 2)
    made = []
    for sample, (reward, attempt) in enumerate([(1.0, 0), (None, 0), (0.0, 1)]):
        key = f"eval-eval-000-{min(sample, 1)}"
        with pytest.raises(InterruptedError):
            begun.run()
        made.append(make_record(f"{key}.{attempt}", reward, group=None, key=key, purpose="eval", attempt=attempt))
        (begun.directory.rollouts / made[-1].id).mkdir()
        (begun.directory.rollouts / made[-1].id / "result.json").write_text(made[-1].model_dump_json())
    assert begun.run() == [made[0], made[2]]


def test_what_a_resumed_one_keeps_is_not_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["run.yaml"], ["--k", "2"], ["--checkpoint", "c"], ["train.steps=1"]):
        assert main(["eval", "--resume", "r", *more]) == 2
        assert "keeps its config" in capsys.readouterr().err
    assert main(["eval"]) == 2 and "no config given" in capsys.readouterr().err
