"""Calls that another model answered as rows of the dataset `upstream`, and back, exactly. They are text: nothing of them is in `calls`.

A request is stored as its difference to an earlier one of the rollout, as in the call log (`forge_ray.trajectories.upstream`), so that a
rollout takes space for its new messages only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from forge_ray.trajectories.store.calls import texts
from forge_ray.trajectories.store.schema import UPSTREAM, StoreError
from forge_ray.trajectories.upstream import Requests, UpstreamCall, restore

SCHEMA = UPSTREAM.schema

_SAME = (
    "upstream", "model", "status", "http_status", "error", "delivered", "kind", "conversation", "dialect", "path", "streamed", "replica",
    "opened", "ended", "request_sha256", "response_sha256",
)  # fmt: skip
"""Columns that are fields of `UpstreamCall` under the same name."""
_JSON = ("reply", "others", "logprobs", "usage")


def table(calls: Sequence[UpstreamCall]) -> pa.Table:
    """Rows of all upstream calls of one rollout, in their order (by their end), of `SCHEMA`."""
    requests, rows = Requests(), []
    for ordinal, call in enumerate(calls):
        row: dict[str, Any] = requests.encode(call.id, call.request)
        requests.remember(call.id)
        row |= {name: getattr(call, name) for name in _SAME}
        row |= {name: None if (value := getattr(call, name)) is None else json.dumps(value) for name in _JSON}
        row |= {"rollout": call.session, "call": call.id, "ordinal": ordinal, "request": json.dumps(row["request"])}
        rows.append(row | {"others": row["others"] if call.others else None})
    return pa.table([texts([row[name] for row in rows], SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA)


def calls(rows: pa.Table, purpose: str) -> list[UpstreamCall]:
    """The calls of the rows, which hold whole rollouts of one `purpose`, in the order of the rows. Raises `StoreError`."""
    entries = rows.to_pylist()
    for entry in entries:
        entry |= {name: None if entry[name] is None else json.loads(entry[name]) for name in (*_JSON, "request")}
    requests, lost = restore({entry["call"]: entry for entry in entries})
    if lost:
        raise StoreError(f"the request of upstream call {lost[0]} cannot be put together: read whole rollouts")
    return [
        UpstreamCall(
            **{name: entry[name] for name in (*_SAME, "reply", "logprobs", "usage")},
            id=entry["call"],
            session=entry["rollout"],
            purpose=purpose,
            request=requests[entry["call"]],
            others=tuple(entry["others"] or ()),
        )
        for entry in entries
    ]
