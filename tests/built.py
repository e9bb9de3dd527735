"""What a builder makes of calls, row by row, for tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from forge_ray.trajectories import builders
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.trajectory import Share, Trajectory, of_calls


@dataclass
class Row:
    """The per-token columns of one row of `schema.SCHEMA`."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    steps: list[int]
    temperature: list[float]
    call: list[int]


def trajectory(calls: Sequence[Call], chosen: Collection[int] | None = None, rollout: str = "g00000-0.0") -> Trajectory:
    """With the calls `chosen` (default: those that may be) trained at weight 1 and advantage 1."""
    made = of_calls(rollout, calls)
    ordinals = [ordinal for ordinal, call in enumerate(made.calls) if call.trainable] if chosen is None else chosen
    made.shares = dict.fromkeys(sorted(ordinals), Share(1.0, 1.0))
    return made


def rows(name: str, calls: Sequence[Call], chosen: Collection[int] | None = None) -> list[Row]:
    """The samples of builder `name`."""
    table = builders.build(name, [trajectory(calls, chosen)])
    return [Row(**{field: row[field] for field in Row.__dataclass_fields__}) for row in table.to_pylist()]


def chains(calls: Sequence[Call], chosen: Collection[int] | None = None) -> list[Row]:
    return rows("chain", calls, chosen)
