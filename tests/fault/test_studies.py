"""The commands that run other commands, as small as they can be made and for real: a transfer of one pair of harnesses, the comparison of
its two evaluations, and an ablation over the rollouts that it stored. A second call makes nothing again."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from forge_ray.config import load
from forge_ray.report.metrics import read_evaluations, read_metrics
from tests.fault.command import QUICKSTART, Command

pytestmark = pytest.mark.timeout(3600)

PORT = int(os.environ.get("FORGE_RAY_TEST_PORT", "18777"))
TASKS, SAMPLES = 6, 2
SHORT = """
from typing import ClassVar
from forge_ray.harnesses.react import React, ReactOptions

class ShortOptions(ReactOptions):
    output_chars: int = 3

class Short(React):
    Options: ClassVar = ShortOptions
"""
RATE = r"[01]\.\d{3} \[0\.\d{3}, [01]\.\d{3}\]"


class Calls:
    """`forge-ray` in one directory, on the prepared policy."""

    def __init__(self, policy: Path, directory: Path) -> None:
        self.directory = directory
        (directory / "short.py").write_text(SHORT)
        harnesses = [{"name": "react", "options": {"output_chars": 60}}, {"name": str(directory / "short.py:Short")}]
        self.config = [
            *(str(QUICKSTART), "name=s", f"runs={directory / 'runs'}", f"sandbox.directory={directory / 'sandboxes'}"),
            *("ray.address=local", f"proxy.port={PORT}", f"policy.model={policy}", "train.sft=null", f"harnesses={json.dumps(harnesses)}"),
            *("train.steps=1", "train.groups_per_step=6", "train.group_size=4", "train.max_staleness=0", "rollouts.max_in_flight=24"),
            *(f"eval.samples={SAMPLES}", "tasks.train.options.count=24", f"tasks.heldout.options.count={TASKS}"),
        ]

    def __call__(self, *words: str, code: int = 0) -> str:
        """What a command prints that ends with `code` and leaves nothing running."""
        with Command(*words, directory=self.directory) as command:
            assert command.wait(1800) == code, command.text[-6000:]
            assert command.left() == []
            return command.text


def test_studies_for_real(policy: Path, tmp_path: Path) -> None:
    call = Calls(policy, tmp_path)
    runs = tmp_path / "runs"

    study = runs / "s-transfer"
    transfer = ("transfer", *call.config, "--train", "react", "--eval", "react,Short")
    first = call(*transfer)
    table = (study / "table.md").read_text()
    lines = table.splitlines()
    assert lines[:2] == ["| trained in | react | Short |", "|---|---|---|"] and len(lines) == 4 and table in first
    assert re.fullmatch(rf"\| initial policy \| {RATE} \| {RATE} \|", lines[2])
    assert re.fullmatch(rf"\| react \| {RATE} \([+-][01]\.\d{{3}}\*?\) \| {RATE} \([+-][01]\.\d{{3}}\*?\) \|", lines[3])
    evaluations = sorted((study / "evaluations").iterdir())
    trained = study / "trained-react"
    assert len(evaluations) == 2 and [step.step for step in read_metrics(trained / "metrics.jsonl")] == [1]
    assert read_evaluations(trained / "metrics.jsonl") == {}, "what a training is worth is measured afterwards"
    again = call(*transfer)
    assert again.count(" is done\n") == 3 and " took " not in again and (study / "table.md").read_text() == table
    assert sorted((study / "evaluations").iterdir()) == evaluations

    after, before = (next(run for run in evaluations if run.name.startswith(name)) for name in ("trained", "start"))
    compared = call("eval", "--resume", str(after), "--against", str(before), "--bootstrap", "--json", str(tmp_path / "compared.json"))
    tree = json.loads((tmp_path / "compared.json").read_text())
    assert {harness: len(tasks) for harness, tasks in tree["passed"].items()} == dict.fromkeys(tree["by_harness"], TASKS)
    assert tree["n"] == 2 * TASKS * SAMPLES and set(tree["pass^k"]) == {"1", "2"} and 0 <= tree["flip_rate"]["mean"] <= 1
    assert tree["against"]["tasks"] == TASKS and 0 < tree["against"]["p"] <= 1
    assert tree["against"]["difference"]["mean"] == pytest.approx(
        tree["pass@1"] - json.loads((before / "evaluation.json").read_text())["pass@1"]
    )
    assert tree["intervals"] == "bootstrap"
    assert f"against {before}: " in compared and "Ray starting" not in compared, "both are done: nothing is started"

    study = runs / "s-ablate"
    stored = [*call.config, "train.groups_per_step=4", f"train.offline.runs={json.dumps([str(trained)])}"]
    ablate = ("ablate", *stored, "--over", "credit.scope=all,last", "--seeds", "1")
    first = call(*ablate)
    table = (study / "table.md").read_text()
    assert table in first and table.startswith("| setting (1 seeds) | reward of the last 5 steps |")
    rows = json.loads((study / "table.json").read_text())["rows"]
    (reward,) = rows[0]["reward"]
    assert [(row["name"], row["reward"]) for row in rows] == [("scope-all", [reward]), ("scope-last", [reward])] and 0 <= reward <= 1
    made = {name: study / f"scope-{name}-seed-0" for name in ("all", "last")}
    assert [load(run / "config.yaml").train.credit.scope for run in made.values()] == list(made)
    every, last = (read_metrics(run / "metrics.jsonl")[0].tokens or 0 for run in made.values())
    assert every >= last, "of the same rollouts, the last calls alone (none of either, where no group's rewards differ)"
    again = call(*ablate)
    assert again.count(" is done\n") == 2 and " took " not in again and (study / "table.md").read_text() == table

    failed = call("ablate", *stored, "--over", "groups_per_step=400,500", "--seeds", "1", code=1)
    assert failed.count("failed with exit code 2") == 2 and "a step takes 500" in failed and "the same command tries them again" in failed
    assert "| groups_per_step-400 | – | – |" in failed
