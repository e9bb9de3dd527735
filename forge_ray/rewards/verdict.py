"""The verdict on one workspace: the task's test script in the sandbox, then its reward function, then one number of all their numbers.

The same for a rollout that has just ended (`actors/attempt.py`) and for a stored one (`job/rescore.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_ray.config import Config
from forge_ray.rewards.call import Question, Scored, score
from forge_ray.rewards.combine import combine
from forge_ray.rewards.plan import function_of
from forge_ray.run_dir import RunDir
from forge_ray.sandboxes.sandbox import Sandbox
from forge_ray.tasks.task import Task
from forge_ray.tasks.verifier import Rewards


@dataclass(frozen=True)
class Subject:
    """The rollout that is judged."""

    run: RunDir
    """Where its calls are."""
    id: str
    archive: Path
    """Its workspace, as the harness left it."""
    harness: str
    outcome: str
    """How the harness ended."""
    logs: Path
    """Folder of `reward.log`; the sandbox has its own for `verifier.log`."""


@dataclass(frozen=True)
class Verdict:
    rewards: Rewards
    """With a terminal reward."""
    scored: Scored | None
    """What the reward function said; None: there is none."""


async def judge(subject: Subject, task: Task, sandbox: Sandbox, config: Config) -> Verdict:
    """Judge the workspace that is in `sandbox`. Script and function have the verifier's limit each. Raises `VerifierError`."""
    limit = task.verifier_timeout_s or config.rollouts.verifier_timeout_s
    said = await sandbox.verify(timeout_s=limit) if task.has_test else None
    scored: Scored | None = None
    if (function := function_of(task, config.rollouts)) is not None:
        question = Question(
            str(function), str(subject.run.root), subject.id, str(subject.archive), task.name, str(task.directory), subject.harness,
            subject.outcome, said.rewards if said else {},
        )  # fmt: skip
        bound, within = config.sandbox.log_bytes, config.sandbox.directory
        scored = await score(function, question, timeout_s=limit, log=subject.logs / "reward.log", log_bytes=bound, within=within)
    rewards = combine(said.rewards if said else None, scored.rewards if scored else None, config.rollouts.reward_weights)
    return Verdict(rewards, scored)
