"""A table of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich import box
from rich.table import Table
from rich.text import Text

from forge_ray.report.records import harness_title
from forge_ray.report.stored.select import Row
from forge_ray.report.trajectory import visible

COLUMNS = ("rollout", "task", "harness", "outcome", "reward", "calls", "sampled_tokens", "started", "seconds", "versions", "purpose")
"""What of the dataset a table needs."""
_OUTCOMES = {"ok": "green", "truncated": "yellow"}


def table(rows: Sequence[Row]) -> Table:
    """One line per rollout."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rollout", "task", "harness", "outcome"):
        made.add_column(name, overflow="fold")
    for name in ("reward", "calls", "tokens", "step", "seconds"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("started", no_wrap=True)
    for row in rows:
        made.add_row(
            *(Text(visible(name)) for name in (row["rollout"], row["task"], harness_title(row["harness"]))),
            Text(row["outcome"], style=_OUTCOMES.get(row["outcome"], "red")),
            number(row["reward"]),
            str(row["calls"]),
            str(row["sampled_tokens"]),
            "" if row["step"] is None else str(row["step"]),
            number(row["seconds"].get("total"), 1),
            moment(row["started"]),
        )
    return made


def number(value: float | None, digits: int | None = None) -> str:
    """A number, or a dash."""
    if value is None:
        return "–"
    return f"{value:g}" if digits is None else f"{value:.{digits}f}"


def moment(seconds: float) -> str:
    """Unix seconds as local time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
