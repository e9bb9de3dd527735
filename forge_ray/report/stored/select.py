"""Which rollouts of a store are meant: rows of the dataset `rollouts` with the step that each belongs to, and filters over them."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forge_ray.errors import UserError
from forge_ray.report.records import harness_title
from forge_ray.trajectories.call import version_step
from forge_ray.trajectories.store.reader import StoreReader

Row = dict[str, Any]
"""Column -> value of the dataset `rollouts`, with `purpose`, `step`, and maps as dicts."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "!=": operator.ne, "==": operator.eq, ">": operator.gt, "<": operator.lt, "=": operator.eq,
}  # fmt: skip
_BOUND = re.compile(r"(>=|<=|!=|==|>|<|=)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
_MAPS = ("rewards", "call_rewards", "seconds", "versions")


@dataclass(frozen=True)
class Filter:
    """Each that is not None must fit. `task` and `harness` may be patterns (`sum-*`); a harness from a file goes by its class as well."""

    task: str | None = None
    harness: str | None = None
    outcome: str | None = None
    purpose: str | None = None
    reward: Callable[[float | None], bool] | None = None
    step: int | None = None

    def fits(self, row: Row) -> bool:
        return (
            (self.task is None or fnmatch.fnmatchcase(row["task"], self.task))
            and (self.harness is None or any(fnmatch.fnmatchcase(name, self.harness) for name in _names(row["harness"])))
            and self.outcome in (None, row["outcome"])
            and self.purpose in (None, row["purpose"])
            and (self.reward is None or self.reward(row["reward"]))
            and self.step in (None, row["step"])
        )


def _names(harness: str) -> tuple[str, str]:
    return harness, harness_title(harness)


def bound(text: str) -> Callable[[float | None], bool]:
    """The condition `>=0.5`, `<1`, `!=0`, `1` or `none` (no reward). A rollout without a reward fits no number. Raises `UserError`."""
    if text.strip() == "none":
        return lambda reward: reward is None
    match = _BOUND.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{text!r} is no condition", where="--reward", fix="write '>=0.5', '<1', '!=0', 1 or none")
    compare, number = _OPERATORS[match[1] or "="], float(match[2])
    return lambda reward: reward is not None and compare(reward, number)


def rows(reader: StoreReader, found: Filter | None = None, columns: Sequence[str] | None = None) -> list[Row]:
    """The rollouts that fit, by the time they started.

    `step` counts as the terminal and `metrics.jsonl` do: the step that trained the rollout, from 1 (the dataset `samples` has it under the
    number of the weights that it began with, one less), in evaluation the steps that its newest weights had been through; None: neither.
    """
    needed = (
        None if columns is None else sorted({*columns, "rollout", "task", "harness", "outcome", "reward", "started", "versions", "purpose"})
    )
    trained = reader.trained_in()
    fitting = []
    for row in reader.table("rollouts", needed).to_pylist():
        row |= {name: dict(row[name] or ()) for name in _MAPS if name in row}
        began = trained.get(row["rollout"])
        row["step"] = None if began is None else began + 1
        if began is None and row["purpose"] == "eval":
            row["step"] = max((version_step(version) for version in row["versions"]), default=None)
        if found is None or found.fits(row):
            fitting.append(row)
    return sorted(fitting, key=lambda row: (row["started"], row["rollout"]))


def one(found: Sequence[Row], name: str) -> Row:
    """The row whose rollout id is `name`, or the only one that begins so. Raises `UserError`."""
    matching = [row for row in found if row["rollout"] == name] or [row for row in found if row["rollout"].startswith(name)]
    if len(matching) == 1:
        return matching[0]
    some = ", ".join(row["rollout"] for row in (matching or found)[:10]) + (", …" if len(matching or found) > 10 else "")
    problem = f"{len(matching)} rollouts begin with {name!r}" if matching else f"no rollout {name!r}; there is"
    raise UserError(f"{problem}: {some or 'none'}", where="forge-ray rollouts show", fix="give one of them")
