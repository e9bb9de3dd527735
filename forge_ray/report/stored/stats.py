"""Counts and means of rollouts, by task, harness, outcome, purpose or step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from forge_ray.outcome import RATED
from forge_ray.report.statistics import mean_ci
from forge_ray.report.stored.listing import number
from forge_ray.report.stored.select import Row
from forge_ray.rollout import usable

BY = ("purpose", "harness", "outcome", "task", "step")
COLUMNS = ("rollout", "task", "harness", "outcome", "reward", "calls", "sampled_tokens", "trainable_tokens", "prompt_tokens", "seconds",
           "versions", "purpose", "started")  # fmt: skip
"""What of the dataset the statistics need."""


def of(rows: Sequence[Row]) -> dict[str, Any]:
    """`n`; `rated` (ok or truncated with a usable reward) with `reward_mean` and `reward_ci`, the half width of its 95 % interval;
    `outcomes`; `truncated` and `failed`, shares of n; means per rollout of `calls`, `sampled_tokens`, `prompt_tokens`, `seconds`;
    `trainable`, the share of the sampled tokens.

    Rollouts of one task are related: where there are several tasks, mean and interval are those of the tasks' means.
    """
    by_task: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["outcome"] in RATED and usable(row["reward"]):
            by_task.setdefault((row["task"], row["purpose"]), []).append(row["reward"])
    rewards = [reward for found in by_task.values() for reward in found]
    mean, half = mean_ci(rewards if len(by_task) == 1 else [statistics.fmean(found) for found in by_task.values()])
    sampled = sum(row["sampled_tokens"] for row in rows)
    outcomes = {name: sum(row["outcome"] == name for row in rows) for name in sorted({row["outcome"] for row in rows})}
    return {
        "n": len(rows),
        "rated": len(rewards),
        "reward_mean": mean,
        "reward_ci": half,
        "outcomes": outcomes,
        "truncated": outcomes.get("truncated", 0) / len(rows) if rows else None,
        "failed": sum(count for name, count in outcomes.items() if name not in RATED) / len(rows) if rows else None,
        "calls": _mean([row["calls"] for row in rows]),
        "sampled_tokens": _mean([row["sampled_tokens"] for row in rows]),
        "prompt_tokens": _mean([row["prompt_tokens"] for row in rows]),
        "seconds": _mean([row["seconds"]["total"] for row in rows if "total" in row["seconds"]]),
        "trainable": sum(row["trainable_tokens"] for row in rows) / sampled if sampled else None,
    }


def by(rows: Sequence[Row], column: str) -> dict[str, dict[str, Any]]:
    """`of` for each value of `column`, numbers by size, texts by the alphabet."""
    parts: dict[Any, list[Row]] = {}
    for row in rows:
        parts.setdefault(row[column], []).append(row)
    order = sorted(parts, key=lambda value: (value is None, value if isinstance(value, int) else 0, str(value)))
    return {"–" if value is None else str(value): of(parts[value]) for value in order}


def table(title: str, found: dict[str, dict[str, Any]]) -> Table:
    """One line per value."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(title, overflow="fold")
    for name in ("n", "rated", "reward", "± 95 %", "truncated", "failed", "calls", "tokens", "trainable", "prompt", "seconds"):
        made.add_column(name, justify="right", no_wrap=True)
    for name, row in found.items():
        made.add_row(
            name,
            str(row["n"]),
            str(row["rated"]),
            number(row["reward_mean"], 3),
            number(row["reward_ci"], 3),
            _percent(row["truncated"]),
            _percent(row["failed"]),
            number(row["calls"], 1),
            number(row["sampled_tokens"], 0),
            _percent(row["trainable"]),
            number(row["prompt_tokens"], 0),
            number(row["seconds"], 1),
        )
    return made


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
