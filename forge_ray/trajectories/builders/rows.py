"""Rows of `schema.SCHEMA`: token sequences that trained calls stand in, with what was recorded about each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.schema import SCHEMA
from forge_ray.trajectories.trajectory import Trajectory


@dataclass
class Row:
    """One sequence: `tokens` int32, (T,), and the ordinals of the trained calls in it, whose sampled tokens follow their prompts there."""

    tokens: np.ndarray
    calls: list[int]


def table(trajectories: Sequence[Trajectory], rows: Sequence[Sequence[Row]]) -> pa.Table:
    """One row of `SCHEMA` per `Row`, by trajectory; the calls' `shares` give advantage and weight."""
    flat = [(trajectory, row) for trajectory, of_one in zip(trajectories, rows, strict=True) for row in of_one]
    lengths = np.array([len(row.tokens) for _, row in flat], np.int64)
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    trained = [(int(start), trajectory, ordinal) for start, (trajectory, row) in zip(starts, flat, strict=True) for ordinal in row.calls]
    calls = [trajectory.calls[ordinal] for _, trajectory, ordinal in trained]
    shares = [trajectory.shares[ordinal] for _, trajectory, ordinal in trained]
    counts = np.array([len(call.ids) for call in calls], np.int64)
    place = ranges(np.array([start + call.prompt_tokens for (start, *_), call in zip(trained, calls, strict=True)], np.int64), counts)

    def per_token(fill: float, kind: type, values: np.ndarray) -> np.ndarray:
        column = np.full(total, fill, kind)
        column[place] = values
        return column

    def per_call(values: list[float], kind: type) -> np.ndarray:
        return np.repeat(np.array(values, kind), counts)

    offsets = pa.array(np.append(starts, total), pa.int32())
    lists = {
        "ids": joined([row.tokens for _, row in flat], np.int32),
        "mask": per_token(False, np.bool_, np.ones(len(place), np.bool_)),
        "logprobs": per_token(0, np.float32, joined([call.logprobs for call in calls], np.float32)),
        "steps": per_token(-1, np.int32, joined([call.steps for call in calls], np.int32)),
        "temperature": per_token(1, np.float32, per_call([call.temperature for call in calls], np.float32)),
        "call": per_token(-1, np.int32, per_call([ordinal for *_, ordinal in trained], np.int32)),
        "advantage": per_token(0, np.float32, per_call([share.advantage for share in shares], np.float32)),
        "weight": per_token(0, np.float32, per_call([share.weight for share in shares], np.float32)),
    }
    plain = {
        "rollout": [trajectory.rollout for trajectory, _ in flat],
        "group": [trajectory.group for trajectory, _ in flat],
        "task": [trajectory.task for trajectory, _ in flat],
        "harness": [trajectory.harness for trajectory, _ in flat],
        "sample": [number for of_one in rows for number in range(len(of_one))],
        "samples": [len(of_one) for of_one in rows for _ in of_one],
        "reward": [trajectory.reward for trajectory, _ in flat],
    }
    columns = []
    for field in SCHEMA:
        if field.name in lists:
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(lists[field.name], field.type.value_type)).cast(field.type))
        else:
            columns.append(pa.array(plain[field.name], field.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: the numbers `starts[0] … starts[0] + counts[0] - 1`, then those from `starts[1]`, and so on."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def joined(parts: Sequence[np.ndarray], kind: type) -> np.ndarray:
    """The parts one after another; of `kind`, also without a part."""
    return np.concatenate([np.zeros(0, kind), *parts])
