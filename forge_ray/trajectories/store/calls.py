"""Calls as rows of the dataset `calls`, and back, exactly.

    table([call …])    the rows of one rollout
    calls(rows)        the same `Call`s again
    expand(rows)       the whole prompt of each row, as arrays

A prompt is stored as its difference to its parent's prompt + sample, as in the call log, so that a rollout takes space for its new tokens
only. Log-probabilities are float32, which is what the engine computes them in: a `Call` whose numbers are such comes back equal.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.store.schema import CALLS, SPANS, StoreError

SCHEMA = CALLS.schema

_SAME = (
    "parent", "shared", "ids", "logprobs", "spans", "version_open", "version_end", "status", "delivered", "superseded_by",
    "masked_by_grammar", "quarantined", "kind", "conversation", "spawned_by", "splice", "reason", "rerendered", "overlap", "max_tokens",
    "model", "ignored", "dialect", "path", "streamed", "replica", "opened", "ended", "finish_reason", "error", "reply", "issued",
    "request_sha256", "response_sha256",
)  # fmt: skip
"""Columns that are fields of `Call` under the same name."""
_JSON = ("sampling", "stop_reason", "usage")
_SURROGATE = re.compile("[\ud800-\udfff]")


def table(calls: Sequence[Call]) -> pa.Table:
    """Rows of all calls of one rollout, in their order (by completion), of `SCHEMA`. Raises `StoreError` where a prompt does not begin as
    its parent and `shared` say."""
    known = {call.id: call for call in calls}
    columns: dict[str, pa.Array] = {}
    for name in _SAME:
        column = SCHEMA.field(name).type
        values = [getattr(call, name) for call in calls]
        if name == "spans":
            columns[name] = _spans(values)
        elif pa.types.is_list(column) and column.value_type in (pa.int32(), pa.float32()):
            columns[name] = _lists(values, column)
        else:
            columns[name] = texts(values, column)
    for name in _JSON:
        columns[name] = pa.array([_dump(getattr(call, name)) for call in calls], pa.string())
    columns["media"] = texts([call.media or None for call in calls], SCHEMA.field("media").type)
    columns["rollout"] = texts([call.session for call in calls])
    columns["call"] = texts([call.id for call in calls])
    columns["ordinal"] = pa.array(range(len(calls)), pa.int32())
    columns["new"] = _lists([_new(call, known) for call in calls], SCHEMA.field("new").type)
    columns["prompt_tokens"] = pa.array([len(call.prompt_ids) for call in calls], pa.int32())
    columns["trainable"] = pa.array([call.trainable for call in calls], pa.bool_())
    columns["temperature"] = pa.array([call.temperature for call in calls], pa.float64())
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def calls(rows: pa.Table, purpose: str) -> list[Call]:
    """The calls of the rows, which hold whole rollouts of one `purpose`, in the order of the rows."""
    columns = {name: rows[name].to_pylist() for name in (*_SAME, *_JSON, "rollout", "call", "media") if name != "spans"}
    spans = [None if row is None else [(span["version"], span["first"], span["end"]) for span in row] for row in rows["spans"].to_pylist()]
    # Lists, not arrays: a prompt shares its parent's integers, so a long session takes memory for its tokens once, and references.
    prompts = _whole(rows, rows["new"].to_pylist(), columns["ids"], lambda *parts: list(itertools.chain(*parts)))
    found = []
    for at, prompt in enumerate(prompts):
        fields: dict[str, Any] = {name: columns[name][at] for name in _SAME if name != "spans"}
        fields |= {name: None if columns[name][at] is None else json.loads(columns[name][at]) for name in _JSON}
        fields |= {"id": columns["call"][at], "session": columns["rollout"][at], "purpose": purpose, "media": columns["media"][at] or []}
        found.append(Call(**fields, spans=spans[at], prompt_ids=prompt))
    return found


def expand(rows: pa.Table) -> list[np.ndarray]:
    """The whole prompt of each row, int32 (prompt_tokens,); the rows of a rollout's ancestors must be there. Raises `StoreError`.

    Rows of several rollouts may stand in any order; `call` names them all."""
    return _whole(rows, arrays(rows["new"]), arrays(rows["ids"]), lambda *parts: np.concatenate(parts))


def _whole(rows: pa.Table, new: Sequence[Any], sampled: Sequence[Any], join: Callable[..., Any]) -> list[Any]:
    """The prompts of `rows`, put together by `join` from pieces of `new` and `sampled`, which hold a sequence for each row."""
    names, parents = rows["call"].to_pylist(), rows["parent"].to_pylist()
    shared = rows["shared"].to_pylist()
    place = {name: at for at, name in enumerate(names)}
    prompts: list[Any] = [None] * len(names)
    for start in range(len(names)):
        chain, at = [], start
        while prompts[at] is None:
            if len(chain) > len(names):
                raise StoreError(f"call {names[at]} is its own ancestor")
            chain.append(at)
            parent = parents[at]
            if parent is None:
                break
            if parent not in place:
                raise StoreError(f"call {parent}, the parent of {names[at]}, is not among the rows: read whole rollouts")
            at = place[parent]
        for at in reversed(chain):
            prompts[at] = _joined(at, parents[at], shared[at], new, sampled, prompts, place, join)
    return prompts


def arrays(column: pa.ChunkedArray | pa.Array) -> list[np.ndarray]:
    """The lists of a column without a null as arrays, views of the column's memory."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    numbers, ends = whole.values.to_numpy(), whole.offsets.to_numpy()
    return [numbers[first:end] for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def texts(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    """Texts (or lists of them) as an array; half a surrogate pair, which JSON may hold and UTF-8 may not, becomes U+FFFD."""
    try:
        return pa.array(values, kind or pa.string())
    except UnicodeEncodeError:
        return pa.array([_clean(value) for value in values], kind or pa.string())


def _clean(value: Any) -> Any:
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return _SURROGATE.sub("\ufffd", value) if isinstance(value, str) else value


def _joined(
    at: int,
    parent: str | None,
    shared: int,
    new: Sequence[Any],
    sampled: Sequence[Any],
    prompts: Sequence[Any],
    place: Mapping[str, int],
    join: Callable[..., Any],
) -> Any:
    if parent is None:
        return new[at]
    before, after = prompts[place[parent]], sampled[place[parent]]
    if shared > len(before) + len(after):
        raise StoreError(f"a call shares {shared} tokens with call {parent}, which has {len(before) + len(after)}")
    return join(before[:shared], after[: max(0, shared - len(before))], new[at])


def _new(call: Call, known: Mapping[str, Call]) -> list[int]:
    if call.parent is None:
        if call.shared:
            raise StoreError(f"call {call.id} shares {call.shared} tokens with no parent")
        return call.prompt_ids
    parent = known.get(call.parent)
    if parent is None:
        raise StoreError(f"call {call.parent}, the parent of {call.id}, is not among the calls of rollout {call.session}")
    split, shared = len(parent.prompt_ids), call.shared
    begins = call.prompt_ids[: min(shared, split)] == parent.prompt_ids[:shared]
    goes_on = call.prompt_ids[split:shared] == parent.ids[: max(0, shared - split)]
    if not begins or not goes_on or shared > len(call.prompt_ids):
        raise StoreError(f"the prompt of call {call.id} does not begin with {shared} tokens of call {call.parent}")
    return call.prompt_ids[call.shared :]


def _lists(values: Sequence[Sequence[Any] | None], kind: pa.ListType) -> pa.Array:
    """Lists of numbers as an array of lists, through one flat numpy array."""
    dtype = np.int32 if kind.value_type == pa.int32() else np.float32
    ends = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if row is None else len(row) for row in values], out=ends[1:], dtype=np.int32)
    flat = np.empty(int(ends[-1]), dtype)
    for row, first, end in zip(values, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if row is not None:
            flat[first:end] = row
    missing = [row is None for row in values]
    mask = pa.array(missing, pa.bool_()) if any(missing) else None
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat), type=kind, mask=mask)


def _spans(values: Sequence[Sequence[tuple[str, int, int]] | None]) -> pa.Array:
    rows = [None if row is None else [{"version": version, "first": first, "end": end} for version, first, end in row] for row in values]
    return pa.array(rows, SPANS)


def _dump(value: Any) -> str | None:
    return None if value is None else json.dumps(value, separators=(",", ":"), allow_nan=False)
