"""Verifiers that tell nothing are named before a run: each is tried on the task's own solution and on an untouched workspace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from forge_ray.config import Config
from forge_ray.job.task_check import problems
from forge_ray.tasks.task import load_task
from tests.task_maker import ALWAYS_ONE, make_task

OUT = "${VERIFIER_DIR:-/logs/verifier}/reward.txt"
ANSWER = f"#!/bin/sh\n[ -e answer ] && echo 1 > {OUT} || echo 0 > {OUT}\n"
NEEDS_A_TOOL = f"#!/bin/sh\nif tool-that-nobody-has; then echo 1 > {OUT}; else echo 0 > {OUT}; fi\n"


def test_tasks_whose_verifier_tells_nothing_are_named(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t"},
        "sandbox": {"directory": str(tmp_path / "boxes")},
    }  # fmt: skip
    made: dict[str, dict[str, Any]] = {
        "good": {"test": ANSWER},
        "tool": {"test": NEEDS_A_TOOL},
        "always": {"test": ALWAYS_ONE},
        "never": {"test": "#!/bin/sh\nexit 0\n"},
        "wrong": {"test": ANSWER},
        "bare": {"test": ANSWER},
    }
    for name, parts in made.items():
        directory = make_task(tmp_path / name, **parts)
        if name != "bare":
            (directory / "solution").mkdir()
            (directory / "solution" / "data").write_text("right")
            line = "exit 3" if name == "wrong" else 'cp "$SOLUTION_DIR/data" answer'
            (directory / "solution" / "solve.sh").write_text(f"#!/bin/sh\n{line}\n")
    tasks = [load_task(tmp_path / name) for name in made]
    found = {task.directory.name: problem for task, problem in asyncio.run(problems(Config.model_validate(tree), tasks, 2))}
    assert found == {
        "tool": "its own solution has reward 0",
        "always": "an untouched workspace has reward 1",
        "never": found.get("never"),
        "wrong": "its own solution has reward 0",
    }
    assert "an untouched workspace cannot be judged: the verifier wrote neither" in found["never"]
    assert not list((tmp_path / "boxes").glob("*/*"))
