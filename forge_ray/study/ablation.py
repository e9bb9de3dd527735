"""Does a setting matter? Its values against one another, over several seeds.

Every value is trained with the same seeds, so differences are taken by seed: what a seed draws (inputs, order of tasks) is the same on both
sides. Intervals are Student's over seeds; `p` is the paired sign-flip test's, which with n seeds cannot be below 2 / 2^n: five seeds
cannot show p < 0.06, seven can show 0.016.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forge_ray.config import known_keys
from forge_ray.errors import UserError
from forge_ray.report.evaluation.comparison import sign_flip
from forge_ray.report.metrics import read_metrics
from forge_ray.report.statistics import mean_ci
from forge_ray.study.cells import Training, plain

LAST = 5
"""Steps at the end over which the training reward is averaged."""


@dataclass(frozen=True)
class Setting:
    """One combination of values."""

    name: str
    overrides: tuple[str, ...]

    def cell(self, seed: int) -> Training:
        return Training(f"{plain(self.name)}-seed-{seed}", (*self.overrides, f"seed={seed}"))


def settings(over: Sequence[str]) -> list[Setting]:
    """Every combination of `key=v1,v2,…`. A key may leave out its beginning where only one ends so. Raises `UserError`."""
    axes = [_axis(text) for text in over]
    found = []
    for combination in itertools.product(*axes):
        found.append(Setting(", ".join(name for name, _ in combination), tuple(override for _, override in combination)))
    names = [plain(setting.name) for setting in found]
    if len(set(names)) != len(names):
        raise UserError("two values are one", where="--over", fix="give each value once")
    if max(map(len, names)) > 50:
        raise UserError(f"{max(names, key=len)} is too long for a name", where="--over", fix="vary fewer keys at once")
    return found


def full_key(key: str) -> str:
    """The known key that `key` is or ends. Raises `UserError`."""
    known = known_keys()
    if key in known:
        return key
    near = [name for name in known if name.endswith(f".{key}")]
    if len(near) != 1:
        what = f"may be {' or '.join(near)}" if near else "is no key of the config"
        raise UserError(f"{key} {what}", where="--over", fix="write the whole key, as in docs/configuration.md")
    return near[0]


def _axis(text: str) -> list[tuple[str, str]]:
    key, separator, values = text.partition("=")
    try:
        parsed = yaml.safe_load(f"[{values}]") if separator else None
    except yaml.YAMLError:
        parsed = None
    if not parsed or len(parsed) < 2:
        raise UserError(f"{text!r} gives nothing to compare", where="--over", fix="write key=value1,value2, as in credit.scope=all,last")
    whole = full_key(key.strip())
    return [
        (f"{key.strip().rpartition('.')[2]}-{value if isinstance(value, str) else json.dumps(value)}", _override(whole, value))
        for value in parsed
    ]


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


@dataclass(frozen=True)
class Row:
    """One setting's results over its seeds."""

    name: str
    after: list[float | None]
    """Held-out pass@1 after training, by seed; None: it was not evaluated."""
    gain: list[float | None]
    """After minus before."""
    reward: list[float | None]
    """Mean training reward of the last steps."""


def read(root: Path, found: Sequence[Setting], seeds: Sequence[int]) -> list[Row]:
    """The rows of a study whose cells are done."""
    rows = []
    for setting in found:
        summaries, rewards = [], []
        for seed in seeds:
            run = root / setting.cell(seed).name
            summaries.append(json.loads((run / "summary.json").read_text()))
            last = [step.reward_mean for step in read_metrics(run / "metrics.jsonl")[-LAST:] if step.reward_mean is not None]
            rewards.append(sum(last) / len(last) if last else None)
        after, before = ([_rate(summary, label) for summary in summaries] for label in ("after", "before"))
        gain = [None if one is None or other is None else one - other for one, other in zip(after, before, strict=True)]
        rows.append(Row(setting.name, after, gain, rewards))
    return rows


def _rate(summary: dict[str, Any], label: str) -> float | None:
    rate = summary["heldout"].get(label)
    return rate["pass@1"] if rate else None


def table(rows: Sequence[Row], seeds: Sequence[int]) -> list[str]:
    """Markdown: each setting, and its difference to the first one's, paired by seed."""
    measure = "after" if any(value is not None for row in rows for value in row.after) else "reward"
    title = "held-out pass@1" if measure == "after" else f"reward of the last {LAST} steps"
    lines = [f"| setting ({len(seeds)} seeds) | {title} | gain | against the first | p | by seed |", "|---|---|---|---|---|---|"]
    first = getattr(rows[0], measure)
    for row in rows:
        values = getattr(row, measure)
        against, p = ("", "") if row is rows[0] else _paired(values, first)
        by_seed = " ".join("–" if value is None else f"{value:.3f}" for value in values)
        lines.append(f"| {row.name} | {_interval(values)} | {_interval(row.gain, '+')} | {against} | {p} | {by_seed} |")
    return lines


def _interval(values: Sequence[float | None], sign: str = "") -> str:
    mean, half = mean_ci(value for value in values if value is not None)
    if mean is None:
        return "–"
    return f"{mean:{sign}.3f}" + (f" ± {half:.3f}" if half is not None else "")


def _paired(values: Sequence[float | None], first: Sequence[float | None]) -> tuple[str, str]:
    differences = [one - other for one, other in zip(values, first, strict=True) if one is not None and other is not None]
    if not differences:
        return "–", "–"
    return _interval(differences, "+"), f"{sign_flip(np.array(differences)):.3f}" if len(differences) > 1 else "–"
