"""Which checkpoints a run keeps: the newest ones, the best one, and what the others stand on.

The best is that of the highest held-out pass@1, or of the highest mean reward of the step that its weights were the first to be used in;
of equals the later one. A checkpoint that has no score yet is never the best, and is kept as one of the newest until it has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from forge_ray.config import Train
from forge_ray.report.metrics import read_metrics
from forge_ray.report.records import evaluation_points, evaluations, read_records
from forge_ray.run_dir import RunDir
from forge_ray.train_loop import checkpoint

By = Literal["heldout", "reward"]


def scores(run: RunDir, by: By) -> dict[int, float]:
    """Score of the weights after so many steps."""
    if by == "reward":
        return {row.step - 1: row.reward_mean for row in read_metrics(run.metrics) if row.reward_mean is not None}
    return {step: rate.pass_at_1 for step, rate in evaluation_points(run, evaluations(read_records(run, "eval-*")))}


def best(run: RunDir, by: By) -> int | None:
    """Step of the best whole checkpoint that has a score; None without one."""
    known = scores(run, by)
    rated = [step for step in checkpoint.steps(run) if step in known and checkpoint.problem(checkpoint.path(run, step)) is None]
    return max(rated, key=lambda step: (known[step], step), default=None)


def prune(run: RunDir, train: Train, upto: int) -> list[Path]:
    """Remove what is not kept after the checkpoint of step `upto` was written; returns what is left."""
    protect = set()
    if train.loss.kl > 0 or train.lora is not None:
        protect.add(0)  # the reference policy; the base of the adapters
    if train.sft is not None:
        protect.add(0)  # what the supervised start made is nowhere else: what learning is measured against
    if train.keep_best is not None and (step := best(run, train.keep_best)) is not None:
        protect.add(step)
    checkpoint.prune(run, train.keep_checkpoints, upto=upto, protect=protect)
    return [checkpoint.path(run, step) for step in checkpoint.steps(run)]
