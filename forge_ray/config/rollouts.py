"""`harnesses`, `tasks`, `sandbox`, `rollouts`: what runs, on what, where, and what becomes of failures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forge_ray.config.values import Count, Number, Positive, Section, Source
from forge_ray.outcome import RATED, Outcome, Treatment

Weight = Annotated[Number, Field(ge=-1e6, le=1e6)]


class Harness(Section):
    """One program under training."""

    name: str
    """A built-in one ([list](harnesses.md)), or `file.py:Class`."""
    model: str | None = None
    """Model name that it asks for; nothing: `policy.served_name`. A name of `proxy.upstreams` makes it a teacher's harness: it is
    evaluated, and never trained."""
    options: dict[str, Any] = {}
    """Options of the adapter."""


class Tasks(Section):
    """Where tasks come from: directories of Harbor-format task directories."""

    train: Source
    """Tasks that are trained on."""
    heldout: Source | None = None
    """Tasks that are only evaluated; none: nothing is evaluated, whatever `eval` says."""


class Sandbox(Section):
    """Where a rollout runs."""

    backend: Literal["process"] = "process"
    """`process`: a process tree on the pool's node."""
    isolation: Literal["auto", "bubblewrap", "none"] = "auto"
    """File-system isolation of the process sandbox; `auto` uses bubblewrap where it works."""
    directory: str | None = None
    """Parent of the sandboxes; default: a folder of its own in the system's temporary directory."""
    memory_mb: Annotated[Count, Field(le=1073741824)] | None = None
    """Default limit of each process's private writable memory; a task's `memory_mb` wins."""
    cpu_seconds: Annotated[Count, Field(le=2147483648)] | None = None
    """CPU seconds of each process."""
    processes: Annotated[Count, Field(le=4194304)] | None = None
    """Most processes of one rollout; for an ordinary user under bubblewrap threads count too."""
    open_files: Annotated[Count, Field(le=1048576)] | None = None
    """Most open files of each process."""
    file_mb: Annotated[Count, Field(le=1073741824)] | None = None
    """Largest file a rollout may write."""
    log_bytes: Annotated[Count, Field(le=2**30)] = 1_000_000
    """Kept bytes of each log."""


class Rollouts(Section):
    """How many, for how long, and what happens to those that fail."""

    max_in_flight: Count = 16
    """Rollouts that run at the same time."""
    pools: Count = 1
    """RolloutPool actors."""
    deadline_s: Positive = 600
    """Wall-clock limit of the harness; a task's smaller `agent.timeout_sec` wins."""
    verifier_timeout_s: Positive = 60
    """Wall-clock limit of the verifier where the task sets none."""
    reward: str | None = None
    """A Python function that rates every rollout, `package.module:function` or `file.py:function`, relative to the config file: see
    [rewards.md](rewards.md). A task's own `[verifier] reward` wins."""
    reward_weights: dict[str, Weight] = {}
    """Name of a reward → its weight: the terminal reward is the weighted sum. Nothing: the reward called `reward`, or the only one."""
    retries: Annotated[int, Field(ge=0)] = 2
    """New attempts for an outcome whose treatment is `retry`."""
    preset: Literal["default", "paper"] = "default"
    """Treatment of the outcome classes: see docs/outcomes.md. `paper` discards timeouts as OpenForgeRL does."""
    on_outcome: dict[Outcome, Treatment] = {}
    """Treatment of single outcome classes, over the preset's. `ok` is always trained; what carries no reward never is."""

    @model_validator(mode="after")
    def _sensible(self) -> Rollouts:
        if self.reward_weights and not any(self.reward_weights.values()):
            raise ValueError("reward_weights: every weight is 0, so that every reward would be")
        for outcome, treatment in self.on_outcome.items():
            if treatment is Treatment.TRAIN and outcome not in RATED:
                raise ValueError(f"on_outcome.{outcome} = train: a rollout that ended so has no reward to train on")
            if treatment is not Treatment.TRAIN and outcome is Outcome.OK:
                raise ValueError(f"on_outcome.ok = {treatment}: then no rollout that ended well would be trained")
        return self
