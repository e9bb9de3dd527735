"""An evaluation's own run directory: begun, and taken up with the plan that it was begun with."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_ray.cli.main import main
from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import heldout


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


def test_what_a_resumed_one_keeps_is_not_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["run.yaml"], ["--k", "2"], ["--checkpoint", "c"], ["train.steps=1"]):
        assert main(["eval", "--resume", "r", *more]) == 2
        assert "keeps its config" in capsys.readouterr().err
    assert main(["eval"]) == 2 and "no config given" in capsys.readouterr().err
