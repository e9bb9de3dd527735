"""`forge-ray check --tasks`: does each task's verifier tell a right answer from none? Sandboxes alone, no model.

A task's own solution must be worth more than an untouched workspace, whose reward must not pass: a test script that writes 0 because a tool
of its own is missing would teach that nothing is ever right, and nobody would see it in a curve.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_ray.config import Config
from forge_ray.errors import ForgeRayError
from forge_ray.rewards.verdict import Subject, judge
from forge_ray.rollout import passes
from forge_ray.run_dir import RunDir
from forge_ray.sandboxes.process import ProcessBackend
from forge_ray.tasks.task import Task

SOLUTION = ".solution"
"""Folder in HOME where the solution's files are; `SOLUTION_DIR` names it."""


async def problems(config: Config, tasks: Sequence[Task], jobs: int) -> list[tuple[Task, str]]:
    """The tasks whose verifier does not tell, each with what is wrong."""
    with tempfile.TemporaryDirectory(prefix="forge-ray-check-") as directory:
        run = RunDir(Path(directory)).create()
        backend = ProcessBackend(config.sandbox, f"check-{os.getpid()}")
        gate = asyncio.Semaphore(jobs)

        async def one(number: int, task: Task) -> tuple[Task, str] | None:
            async with gate:
                found = await _problem(task, config, run, backend, number)
            return None if found is None else (task, found)

        return [found for found in await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks))) if found is not None]


async def _problem(task: Task, config: Config, run: RunDir, backend: ProcessBackend, number: int) -> str | None:
    try:
        empty = await _reward(task, config, run, backend, f"empty-{number}", solve=False)
    except ForgeRayError as error:
        return f"an untouched workspace cannot be judged: {error}"
    if passes(empty):
        return f"an untouched workspace has reward {empty:g}"
    if task.solution is None:
        return None
    try:
        solved = await _reward(task, config, run, backend, f"solved-{number}", solve=True)
    except ForgeRayError as error:
        return f"its own solution cannot be judged: {error}"
    if solved <= empty or not (passes(solved) or config.rollouts.reward_weights):
        return f"its own solution has reward {solved:g}"
    return None


async def _reward(task: Task, config: Config, run: RunDir, backend: ProcessBackend, name: str, *, solve: bool) -> float:
    """Reward of the workspace as the task lays it out, or after its solution. Raises `ForgeRayError`."""
    logs = run.rollouts / name
    async with await backend.create(task, name, logs) as sandbox:
        if solve:
            await sandbox.put(dict(_solution(task)), to="home", mode=0o755)
            where = f"{sandbox.home}/{SOLUTION}"
            limit = task.agent_timeout_s or config.rollouts.deadline_s
            await sandbox.run(["/bin/bash", f"{where}/solve.sh"], deadline_s=limit, env={"SOLUTION_DIR": where}, log="solution")
        digest = await sandbox.archive(run.rollouts / "archive")
        archive = run.rollouts / "archive" / f"{digest}.tar.gz"
        verdict = await judge(Subject(run, name, archive, "", "ok", logs), task, sandbox, config)
    assert verdict.rewards.reward is not None
    return verdict.rewards.reward


def _solution(task: Task) -> Iterator[tuple[str, bytes]]:
    assert task.solution is not None
    root = task.solution.parent
    for file in sorted(root.rglob("*")):
        if file.is_file():
            yield f"{SOLUTION}/{file.relative_to(root).as_posix()}", file.read_bytes()
