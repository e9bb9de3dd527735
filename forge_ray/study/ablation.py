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

from forge_ray.config import Config, known_keys
from forge_ray.errors import UserError
from forge_ray.report.evaluation.comparison import sign_flip
from forge_ray.report.metrics import read_metrics
from forge_ray.report.statistics import mean_ci
from forge_ray.study.cells import Training, plain

LAST = 5
"""Steps at the end over which the training reward is averaged."""
OWN_START = ("train.sft", "train.precision", "train.offline")
"""Below `train`, what the supervised start depends on. Everything else there only says how the policy learns after it."""


@dataclass(frozen=True)
class Setting:
    """One combination of values."""

    name: str
    overrides: tuple[str, ...]

    def cell(self, seed: int, begun_by: Setting | None = None, *, supervised: bool = False) -> Training:
        """Its cell of a seed. `begun_by`: the setting whose cell of that seed has the same start."""
        first = None if begun_by is None or begun_by is self else begun_by.cell(seed).name
        return Training(f"{plain(self.name.replace(', ', '_'))}-seed-{seed}", (*self.overrides, f"seed={seed}"), first, supervised)


def settings(over: Sequence[str]) -> list[Setting]:
    """Every combination of `key=v1,v2,…`. A key may leave out its beginning where only one ends so. Raises `UserError`."""
    axes = [_axis(text) for text in over]
    found = []
    for combination in itertools.product(*axes):
        found.append(Setting(", ".join(name for name, _ in combination), tuple(override for _, override in combination)))
    if len({setting.name for setting in found}) != len(found):
        raise UserError("two values are one", where="--over", fix="give each value once")
    return found


def cells(config: Config, found: Sequence[Setting], seeds: Sequence[int]) -> list[Training]:
    """Seed by seed, so that an early table compares. Where the settings differ only in how the policy learns, the first of a seed makes the
    start of all."""
    first = found[0] if shared_start(config, found) else None
    return [setting.cell(seed, first, supervised=config.train.sft is not None) for seed in seeds for setting in found]


def shared_start(config: Config, found: Sequence[Setting]) -> bool:
    """Whether the settings leave the policy as it is until the first step: the supervised start and the evaluation of it are the same."""
    keys = [override.partition("=")[0] for setting in found for override in setting.overrides]
    return config.train.offline is None and all(key.startswith("train.") and not key.startswith(OWN_START) for key in keys)


def full_key(key: str) -> str:
    """The known key that `key` is or ends, or `key` itself where it is one below a known one. Raises `UserError`."""
    known = known_keys()
    if key in known:
        return key
    near = [name for name in known if name.endswith(f".{key}")]
    if not near and any(key.startswith(f"{name}.") for name in known):
        return key  # an option of the user's, or an item of a list
    if len(near) != 1:
        what = f"may be {' or '.join(near)}" if near else "is no key of the config"
        raise UserError(f"{key} {what}", where="--over", fix="write the whole key, as in docs/configuration.md")
    return near[0]


def _short(key: str) -> str:
    """The shortest end of a key that is no other's."""
    known, parts = known_keys(), key.split(".")
    if key not in known:
        return key
    for start in range(len(parts) - 1, 0, -1):
        end = ".".join(parts[start:])
        if not any(name != key and (name == end or name.endswith(f".{end}")) for name in known):
            return end
    return key


def _axis(text: str) -> list[tuple[str, str]]:
    key, separator, values = text.partition("=")
    try:
        parsed = yaml.safe_load(f"[{values}]") if separator else None
    except yaml.YAMLError:
        parsed = None
    if not parsed or len(parsed) < 2:
        raise UserError(f"{text!r} gives nothing to compare", where="--over", fix="write key=value1,value2, as in credit.scope=all,last")
    whole = full_key(key.strip())
    if whole in ("seed", "name", "runs"):
        raise UserError(f"{whole} is the study's own", where="--over", fix="vary another key; --seeds says how many seeds")
    return [(f"{_short(whole)}-{value if isinstance(value, str) else json.dumps(value)}", _override(whole, value)) for value in parsed]


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


@dataclass(frozen=True)
class Row:
    """One setting's results over its seeds."""

    name: str
    after: list[float | None]
    """Held-out pass@1 after training, by seed; None: it was not evaluated, or the cell is not done."""
    gain: list[float | None]
    """After minus before."""
    reward: list[float | None]
    """Mean training reward of the last steps."""


def read(root: Path, config: Config, found: Sequence[Setting], seeds: Sequence[int]) -> list[Row]:
    """The rows of a study, of the cells that are done."""
    shared = shared_start(config, found)
    rows = []
    for setting in found:
        after, gain, rewards = [], [], []
        for seed in seeds:
            run = root / setting.cell(seed).name
            summary = _summary(run)
            before = _rate(summary, "before")
            if before is None and shared and summary is not None:
                before = _rate(_summary(root / found[0].cell(seed).name), "before")
            after.append(_rate(summary, "after"))
            gain.append(None if after[-1] is None or before is None else after[-1] - before)
            steps = read_metrics(run / "metrics.jsonl")[-LAST:] if summary is not None else []
            last = [step.reward_mean for step in steps if step.reward_mean is not None]
            rewards.append(sum(last) / len(last) if last else None)
        rows.append(Row(setting.name, after, gain, rewards))
    return rows


def _summary(run: Path) -> dict[str, Any] | None:
    """What the run came to; None unless it is done."""
    file = run / "summary.json"
    return json.loads(file.read_text()) if file.is_file() else None


def _rate(summary: dict[str, Any] | None, label: str) -> float | None:
    rate = summary["heldout"].get(label) if summary is not None else None
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
