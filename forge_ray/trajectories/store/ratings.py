"""The dataset `ratings`: what a served teacher said of the calls that a step trained on, put before the step's batch.

    ratings/purpose=train/step-000012.parquet

A step that is formed again (its batch was not stored yet) has its file put again. The train workers read their step's file; a later run on
these rollouts (`--from-rollouts`) looks ratings up by rollout and call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forge_ray.trajectories.ratings import Rating
from forge_ray.trajectories.store.calls import arrays
from forge_ray.trajectories.store.location import SUFFIX, Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.schema import RATINGS, StoreError
from forge_ray.trajectories.store.writer import parquet


def put(location: Location, step: int, teacher: str, model: str, rows: Iterable[Rating]) -> None:
    """Store the ratings of a step's batch. Raises `StoreError`."""
    some = list(rows)
    columns = {
        "teacher": [teacher] * len(some),
        "model": [model] * len(some),
        "rollout": [row.rollout for row in some],
        "call": [row.call for row in some],
        "ordinal": [row.ordinal for row in some],
        "logprobs": [row.logprobs for row in some],
    }
    schema = RATINGS.schema
    table = pa.table([pa.array(columns[name], schema.field(name).type) for name in schema.names], schema=schema)
    location.put(_file(step), parquet(table))


def of_step(location: Location, step: int) -> dict[tuple[str, int], pa.Array]:
    """Log-probabilities, float32 arrays, by rollout and ordinal of the call. Raises `StoreError` where the step has none."""
    path = location.path(_file(step))
    try:
        with location.filesystem.open_input_file(path) as opened:
            table = pq.read_table(opened, columns=["rollout", "ordinal", "logprobs"])
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} holds no ratings: {error}") from error
    keys = zip(table["rollout"].to_pylist(), table["ordinal"].to_pylist(), strict=True)
    return dict(zip(keys, arrays(table["logprobs"]), strict=True))


def known(reader: StoreReader, teacher: str, model: str, rollouts: Collection[str]) -> Mapping[tuple[str, str], Rating]:
    """What is recorded of this teacher on these rollouts, by rollout and call id."""
    where = (pc.field("teacher") == teacher) & (pc.field("model") == model) & pc.field("rollout").isin(list(rollouts))
    table = reader.table(RATINGS.name, ["rollout", "call", "ordinal", "logprobs"], where)
    plain = zip(*(table[name].to_pylist() for name in ("rollout", "call", "ordinal")), arrays(table["logprobs"]), strict=True)
    return {(rollout, call): Rating(rollout, call, ordinal, logprobs) for rollout, call, ordinal, logprobs in plain}


def _file(step: int) -> str:
    return f"{RATINGS.name}/purpose=train/step-{step:06d}{SUFFIX}"
