"""`metrics.jsonl`: one line per training step, and one per held-out evaluation (`"event": "eval"`).

Invariants: a line is on disk when `append` returns; the file holds strict JSON (NaN and infinity become null); a line that a crash
cut off is removed when the file is opened again. After a resume a step may be written a second time: readers take the last line of
each step, which is the one in the lineage of the final checkpoint. Lines may hold more than `StepMetrics` names; nothing is lost.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from forge_ray.report.sinks import Sinks


class StepMetrics(BaseModel):
    """What is known about one training step. None: not measured in this step."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    step: int
    """Number of the step, from 1."""
    version: str = ""
    """Weight version that the step produced, `<incarnation>.<step>`."""
    seconds: float | None = None
    """Wall seconds since the step before ended."""
    reward_mean: float | None = None
    """Mean terminal reward of the trained rollouts."""
    reward_ci: float | None = None
    """Half width of its 95 % interval, over trajectories."""
    pass_rate: float | None = None
    """Share of the trained rollouts with a reward of at least 1."""
    harnesses: dict[str, dict[str, float]] | None = None
    """By harness, where the batch has several: `rollouts`, `valid`, `reward_mean`, `pass_rate`."""
    outcomes: dict[str, int] = Field(default_factory=dict)
    """Rollouts that ended since the step before, by outcome class."""
    treatments: dict[str, int] = Field(default_factory=dict)
    """What became of them: train, retry, drop, drop_group (`rollouts.on_outcome`)."""
    unused_rollouts: int | None = None
    """Rollouts so far that were fit to be trained and never will be: their group was dropped, shrank, grew stale or was replaced."""
    resampled_groups: int | None = None
    """Groups that said nothing and were replaced for this step (`train.dynamic_sampling`)."""
    groups: int | None = None
    """Groups in the batch."""
    degenerate_groups: int | None = None
    """Groups of them that teach nothing: all rewards equal, or fewer than two rollouts."""
    rollouts_untrained: int | None = None
    """Rollouts in the batch with a reward and without a token that may be trained."""
    staleness_mean: float | None = None
    """Mean over the trained tokens of (version − version that sampled the token)."""
    staleness_max: float | None = None
    """The oldest trained token's."""
    staleness_tokens: dict[str, int] | None = None
    """Trained tokens by their staleness."""
    held_s: float | None = None
    """Seconds that the step waited for a slow group although there were enough others (`train.on_stale: wait`)."""
    rollout_tokens_per_s: float | None = None
    """Sampled tokens of the rollouts that ended, per wall second of the step."""
    train_tokens_per_s: float | None = None
    """Trained tokens per second of training."""
    tokens: int | None = None
    """Trained tokens of the batch (sampled and not masked)."""
    samples_per_rollout: float | None = None
    calls_exact: int | None = None
    """Calls of the batch's rollouts whose prompt went on from the call before it as it was rendered."""
    calls_spliced: int | None = None
    """Calls whose prompt did after replies were put back as they were sampled."""
    calls_forked: int | None = None
    """Calls whose prompt did not: each begins a new sample."""
    fork_reason: str | None = None
    """The commonest reason of a fork, after the number of calls that had it."""
    loss: float | None = None
    """The whole loss, mean over the updates; see docs/algorithms.md for this and the next ones, all means over the trained tokens."""
    policy_loss: float | None = None
    """Its objective alone, without KL, entropy and a teacher's term."""
    kl: float | None = None
    """Estimate (`train.loss.kl_kind`) of KL(policy || reference)."""
    reward_kl: float | None = None
    """That of `reinforce_pp`, which is in the reward."""
    old_kl: float | None = None
    """k3 estimate of KL(policy || what sampled the tokens)."""
    proximal_kl: float | None = None
    """The same of the policy before the step's first update (`train.loss.old_policy: recomputed`): engine against trainer, staleness."""
    teacher_kl: float | None = None
    """Mean of policy − teacher log-probability: reverse KL to the teacher (`train.loss.distillation`)."""
    entropy: float | None = None
    """Nats per token."""
    ratio: float | None = None
    """Policy / old policy."""
    clip_low: float | None = None
    """Share of the tokens cut at the lower bound."""
    clip_high: float | None = None
    """Share cut at the upper bound."""
    clip_dual: float | None = None
    """Share cut by `train.loss.clip_dual`."""
    clip_fraction: float | None = None
    """Share of the tokens whose ratio was clipped."""
    importance: float | None = None
    """Importance weight as applied (`train.loss.importance`)."""
    importance_max: float | None = None
    """Largest weight of a token or sequence before the cap, over the whole step."""
    importance_capped: float | None = None
    """Share of the tokens whose weight was cut or masked."""
    stale_masked: float | None = None
    """Share of the tokens that `train.loss.stale` left out."""
    grad_norm: float | None = None
    """Before clipping, mean over the updates."""
    updates: int | None = None
    """Optimizer updates; 0 where nothing of the batch taught anything."""
    updates_skipped: int | None = None
    """Updates that were left out: their gradient was not finite, or above `train.optimizer.skip_grad_norm`."""
    trainer_restarts: int | None = None
    """Times that this driver has seen the train workers start again."""
    lr: float | None = None
    logprob_diff: float | None = None
    """Mean |rollout − trainer logprob| over tokens whose sampling weights the trainer still has, under those weights."""
    sync_s: float | None = None
    """Seconds of the weight update, all replicas."""
    wait_s: float | None = None
    """Seconds the learner waited for rollouts."""
    train_s: float | None = None
    """Seconds of forward, backward and optimizer."""
    trainer_idle_share: float | None = None
    """Share of the step in which the learner waited for rollouts."""
    slot_idle_share: float | None = None
    """Share of the step's places for rollouts (`rollouts.max_in_flight`) in which none ran."""

    @property
    def signal(self) -> int | None:
        """Groups that teach something."""
        return None if self.groups is None or self.degenerate_groups is None else self.groups - self.degenerate_groups


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity, at any depth, replaced by None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class MetricsWriter:
    """Appends to a `metrics.jsonl`. One writer at a time: the driver. `sinks` are given every line, too."""

    def __init__(self, path: Path, sinks: Sinks | None = None) -> None:
        self._sinks = sinks
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.ftruncate(self._file, whole)

    def append(self, row: Mapping[str, Any] | StepMetrics) -> None:
        """Write one line and sync it."""
        plain = row.model_dump() if isinstance(row, StepMetrics) else dict(row)
        line = json.dumps(finite(plain), allow_nan=False, separators=(",", ":"))
        data = memoryview(line.encode() + b"\n")
        while data:
            data = data[os.write(self._file, data) :]
        os.fdatasync(self._file)
        if self._sinks is not None:
            self._sinks.send(plain)

    def close(self) -> None:
        os.close(self._file)
        if self._sinks is not None:
            self._sinks.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of `path` that is a JSON object; nothing where the file is missing."""
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue  # written by hand or by another program: a report shows the rest
        if isinstance(row, dict):
            yield row


def read_metrics(path: Path) -> list[StepMetrics]:
    """The training steps in `path` in their order, the last line of each."""
    steps: dict[int, StepMetrics] = {}
    for row in read_rows(path):
        if row.get("event", "step") == "step":
            try:
                metrics = StepMetrics.model_validate(row)
            except ValidationError:
                continue
            steps[metrics.step] = metrics
    return [steps[step] for step in sorted(steps)]


def read_evaluations(path: Path) -> dict[str, dict[str, Any]]:
    """The held-out evaluations in `path` by their label, the last line of each; `step` says after how many steps it was made."""
    rows = (row for row in read_rows(path) if row.get("event") == "eval")
    return {str(row.get("label")): row for row in rows if isinstance(row.get("step"), int)}
