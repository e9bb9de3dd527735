"""The recipes after OpenForgeRL: the paper's numbers, configs that load, and a check that says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_ray.cli.main import main
from forge_ray.config import Config, load
from forge_ray.harnesses.harness import BUILT_IN
from forge_ray.job import resources

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
PAPER: dict[str, dict[str, Any]] = {
    "claw": {"lr": 1e-6, "kl": 0.001, "deadline": 900, "calls": None, "model": "Qwen3-30B-A3B-Thinking"},
    "computer": {"lr": 5e-7, "kl": 0.01, "deadline": 600, "calls": None, "model": "Qwen3-VL-8B-Thinking"},
    "browser": {"lr": 1e-6, "kl": 0.0, "deadline": None, "calls": 20, "model": "Qwen3-VL-8B-Thinking"},
}


def recipe(name: str) -> Config:
    return load(RECIPES / f"{name}.yaml")


def test_each_recipe_is_tested() -> None:
    assert {file.stem for file in RECIPES.glob("*.yaml")} == set(PAPER)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_numbers(name: str) -> None:
    paper, config = PAPER[name], recipe(name)
    train = config.train
    assert (train.optimizer.lr, train.loss.kl, train.loss.entropy, train.credit.gamma) == (paper["lr"], paper["kl"], 0, 1)
    assert (train.groups_per_step, train.group_size) == (8, 8)
    assert (train.loss.name, train.builder, train.advantage.name) == ("grpo", "per_call", "grpo")
    assert paper["deadline"] in (None, config.rollouts.deadline_s) and config.proxy.limits.calls == paper["calls"]
    assert paper["model"] in config.policy.model.path and config.rollouts.preset == "paper"
    assert all(harness.name in BUILT_IN for harness in config.harnesses)
    assert train.worker_gpus and config.proxy.replica_gpus


@pytest.mark.parametrize("name", PAPER)
def test_the_check_says_what_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for variable in ("MODELS", "TASKS"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    assert main(["check", str(RECIPES / f"{name}.yaml"), f"runs={tmp_path / 'runs'}", "ray.address=local", "ray.num_cpus=64"]) == 2
    told = capsys.readouterr()
    lines = told.out.splitlines()
    missing = {line.split()[1] for line in lines if line.startswith("MISS")}
    assert {"policy.model", "tasks.train", "tasks.heldout"} <= missing
    gpus = resources.own(recipe(name))["GPU"]
    wanted = recipe(name).train.workers + recipe(name).proxy.replicas * int(recipe(name).proxy.replica_gpus)
    assert any(" GPUs" in line and "own cluster has" in line for line in lines) == (gpus < wanted)
    assert "Traceback" not in told.out + told.err and told.err.count("\n") == 1
