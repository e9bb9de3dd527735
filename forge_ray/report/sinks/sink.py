"""What a sink is, and the numbers that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from forge_ray.report.records import harness_title

PREFIX = {"step": "", "eval": "eval/"}
"""Of a number's name, by the event of its line."""
WHEN = ("step", "ended")
"""Numbers of a line that say when, not what."""


class Sink(Protocol):
    """Made and used in one thread. May raise whatever it likes: see `Sinks`."""

    name: str

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step (or of an evaluation after it)."""
        ...

    def close(self) -> None:
        """Everything written is where it belongs when this returns."""
        ...


def numbers(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The step of a line of `metrics.jsonl`, and its finite numbers by name; nested ones as `outcomes/ok`. True and false are 1 and 0."""
    prefix = PREFIX.get(str(row.get("event", "step")), f"{row.get('event')}/")
    values = dict(_flat(row, prefix))
    return int(row.get("step") or 0), values


def _flat(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            # The path of a harness from a file would make a name that MLflow refuses, and nobody reads.
            yield from _flat(value, f"{prefix}{harness_title(name)}/")
        elif isinstance(value, int | float) and value == value and abs(value) != float("inf") and name not in WHEN:
            yield f"{prefix}{name}", float(value)
