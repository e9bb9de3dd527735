"""The Arrow schema of samples: one row per sample, the same on the wire, in Parquet and in a Ray Dataset.

Columns (T = number of tokens of the row; lists are per token and of equal length):

    column       type           unit, shape                  from
    rollout      string         rollout id                   RolloutRecord.id (= session id of the calls)
    group        int64          group number                 RolloutRecord.group
    task         string         task name                    RolloutRecord.task_name
    harness      string         harness name                 RolloutRecord.harness
    sample       int32          index in the rollout         builder
    samples      int32          samples of the rollout       builder
    ids          list<int32>    token ids, (T,)              Call.prompt_ids, Call.ids
    mask         list<bool>     (T,)                         sampled by a trainable call that is in scope
    logprobs     list<float32>  nats, (T,)                   Call.logprobs where mask, else 0
    steps        list<int32>    weight updates, (T,)         Call.spans where mask, else -1
    temperature  list<float32>  (T,)                         Call.sampling where mask, else 1
    call         list<int32>    ordinal by completion, (T,)  the sampling call where mask, else -1
    advantage    list<float32>  (T,)                         gamma^(T-t) of the call times the trajectory's advantage, else 0
    weight       list<float32>  (T,)                         weight of the call's kind; 0: not in the loss (also: degenerate group)
    reward       float64        terminal reward r_T          RolloutRecord.reward

The loss takes the positions with `weight` > 0, which all have `mask` true. No list holds a null. Types never follow from the data,
so a file whose `group` is null in every row has the same schema as any other.
"""

from __future__ import annotations

import pyarrow as pa

from forge_ray.errors import ForgeRayError
from forge_ray.trajectories.tree_schema import TREE_SCHEMA, is_tree

SCHEMA = pa.schema(
    [
        pa.field("rollout", pa.string(), nullable=False),
        pa.field("group", pa.int64()),
        pa.field("task", pa.string(), nullable=False),
        pa.field("harness", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("samples", pa.int32(), nullable=False),
        pa.field("ids", pa.list_(pa.int32()), nullable=False),
        pa.field("mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("steps", pa.list_(pa.int32()), nullable=False),
        pa.field("temperature", pa.list_(pa.float32()), nullable=False),
        pa.field("call", pa.list_(pa.int32()), nullable=False),
        pa.field("advantage", pa.list_(pa.float32()), nullable=False),
        pa.field("weight", pa.list_(pa.float32()), nullable=False),
        pa.field("reward", pa.float64()),
    ],
    metadata={"forge_ray.samples": "1"},
)
"""Version 1. A change of meaning raises the number in the metadata."""

STATS = b"forge_ray.stats"
"""Key of a file's metadata with the batch's stats as JSON."""


class SchemaError(ForgeRayError):
    """A table or file that is no table of samples."""


def check_version(schema: pa.Schema) -> None:
    """Raise `SchemaError` where a table says that it is of another version than `SCHEMA` or `TREE_SCHEMA`; one that says none is taken."""
    for key, known in {**(SCHEMA.metadata or {}), **(TREE_SCHEMA.metadata or {})}.items():
        found = (schema.metadata or {}).get(key, known)
        if found != known:
            name = key.decode().rpartition(".")[2]
            raise SchemaError(f"{name} of version {found.decode(errors='replace')}; this ForgeRay reads version {known.decode()}")


def conform(table: pa.Table) -> pa.Table:
    """The same rows with exactly `SCHEMA`, or `TREE_SCHEMA` if it holds tries (columns in order, nullability and metadata that other tools
    may have dropped put back). Raises `SchemaError`."""
    check_version(table.schema)
    schema = TREE_SCHEMA if is_tree(table) else SCHEMA
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise SchemaError(f"not a table of samples: column {missing[0]} is missing")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise SchemaError(f"not a table of samples: {error}") from error
