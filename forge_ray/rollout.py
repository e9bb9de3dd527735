"""The contract between the learner's side and the actors: what is asked (`RolloutRequest`) and what came back (`RolloutRecord`).

Both are plain pydantic models that go through JSON unchanged; a record is written to `rollouts/<id>/result.json` before anyone
is told about it. Neither holds a token: those are in the call log, under `RolloutRecord.session`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from forge_ray.errors import one_line
from forge_ray.outcome import RATED, Outcome

Purpose = Literal["train", "eval"]

MAX_REWARD = 1e12
"""Largest magnitude of a number that a verifier may give: its square, and sums of it, still fit a double and a float32."""


PASS = 1.0
"""A rollout passes with a terminal reward of at least this."""


def passes(reward: float | None) -> bool:
    """Whether a terminal reward is a pass; without one it is none."""
    return reward is not None and reward >= PASS


def usable(number: float | None) -> bool:
    """Whether statistics may be made of a verifier's number: it is there, and neither NaN, infinite nor beyond `MAX_REWARD`."""
    return number is not None and abs(number) <= MAX_REWARD


def usable_of(numbers: Iterable[float | None]) -> list[float]:
    """The `usable` ones, in order."""
    return [number for number in numbers if number is not None and usable(number)]


class RolloutRequest(BaseModel):
    """One rollout that somebody wants. The same request may arrive twice (Ray retries); `key` tells."""

    model_config = ConfigDict(extra="forbid")

    key: str
    """Unique in the run and safe as a file name, such as `g00012-3` or `eval-after-t07-2`; attempts of it are numbered below it."""
    purpose: Purpose
    """Decides the sampling settings that the proxy applies and whether the recording may be trained."""
    task: str
    """Absolute path of the task directory."""
    task_name: str
    harness: str
    """Name in the config's `harnesses`."""
    group: int | None = None
    """Training group, None in evaluation."""
    attempt: int = 0
    """First attempt number to try; the pool takes the next free one."""


class RolloutRecord(BaseModel):
    """How one attempt ended."""

    model_config = ConfigDict(extra="forbid")

    id: str
    """`<key>.<attempt>`; also the session id at the proxy and the directory name under `rollouts/`."""
    key: str
    purpose: Purpose
    task: str
    task_name: str
    harness: str
    group: int | None
    attempt: int
    outcome: Outcome
    detail: str
    """One line for a person: which limit, which error, with the real seconds where time was it."""
    reward: float | None = None
    """Terminal reward r_T; None unless the outcome is ok or truncated."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Every named number of the verifier and of the reward function."""
    call_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards of single calls, where the reward function gives such: call id, or place among the calls (`0` the first, `-1` the last)."""
    reward_digest: str | None = None
    """sha256, hex, of the reward function's sources; None: no function was asked."""
    ended: Outcome | None = None
    """How the harness had ended before verification, where it was verified: a rollout whose verdict failed can be rescored."""
    exit_code: int | None = None
    """The harness's exit code: a hint only."""
    task_digest: str | None = None
    """`sha256:…` of the task's files when it ran, see `forge_ray.tasks.digest`."""
    image_digest: str | None = None
    """`sha256:…` of what the sandbox's image is built from, the task's `environment/`: see `forge_ray.tasks.digest`."""
    image_base: str | None = None
    """The image that its Dockerfile begins with, as it names it. A process sandbox does not run it."""
    harness_version: str | None = None
    """The program's packages and versions, or its file's sha256."""
    workspace_digest: str | None = None
    """sha256 of the archived workspace, taken before verification; `rollouts/archive/<digest>.tar.gz`."""
    calls: int = 0
    """Calls of the session that finished."""
    sampled_tokens: int = 0
    upstream_calls: int = 0
    """Calls of the session that another model answered."""
    started: float = 0.0
    """Unix seconds."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall seconds by phase: `create`, `harness`, `archive`, `verify`, `total`."""

    @field_validator("detail", mode="before")
    @classmethod
    def _one_line(cls, value: object) -> object:
        # It may quote what a program wrote or how a file is called, and must not cost the rollout its record.
        return one_line(value) if isinstance(value, str) else value


def reward_of(record: RolloutRecord) -> float | None:
    """The terminal reward that may enter group statistics: None unless the outcome is rated and the number `usable`."""
    return record.reward if record.outcome in RATED and usable(record.reward) else None
