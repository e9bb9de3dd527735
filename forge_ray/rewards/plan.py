"""Which reward function a task's rollouts are given to, and what of tasks and config cannot work together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from forge_ray.config import Rollouts
from forge_ray.errors import UserError
from forge_ray.reference import Reference, missing, parse
from forge_ray.tasks.task import Task


def function_of(task: Task, rollouts: Rollouts) -> Reference | None:
    """The task's own (`[verifier] reward`), else the run's (`rollouts.reward`), else None. Raises `UserError`."""
    if task.spec.verifier.reward is not None:
        return parse(task.spec.verifier.reward, task.directory, f"{task.directory / 'task.toml'}: verifier.reward")
    return parse(rollouts.reward, Path.cwd(), "rollouts.reward") if rollouts.reward is not None else None


def refuse(tasks: Iterable[Task], rollouts: Rollouts) -> None:
    """Raise `UserError` for the first task whose reward function is not there, or whose rollouts would have several rewards and no rule
    that makes one of them."""
    there: set[Reference] = set()
    for task in tasks:
        reference = function_of(task, rollouts)
        if reference is None:
            continue
        own = task.spec.verifier.reward is not None
        where = f"{task.directory / 'task.toml'}: verifier.reward" if own else "rollouts.reward"
        if reference not in there and (problem := missing(reference)) is not None:
            raise UserError(problem, where=where, fix="correct the name or the file")
        there.add(reference)
        if task.has_test and not rollouts.reward_weights:
            raise UserError(
                f"task {task.name} has a verifier and a reward function, and nothing says what each is worth",
                where="rollouts.reward_weights",
                fix=f"write the weight of each number, for example {{reward: 1.0, {reference.function}: 0.1}}",
            )
