"""The Parquet form of the call log: one row per call, and a row for every event that belongs to no call's row.

Columns of a call's row (`row` = "call"). Null: there was no such event, or the event had null there.

    column              type                 unit, from
    row                 string               call | event
    session             string               session id; "" for an event whose call was never opened
    replica             string               the replica that wrote the (open) event
    event               string               event rows: the event's name
    call                string               call id
    t                   float64              Unix seconds of the (open) event
    purpose dialect path kind conversation request_sha256 parent splice reason spawned_by model   string    open event
    streamed masked_by_grammar               bool       open event
    shared max_tokens overlap   int32        tokens, open event
    new                 list<int32>          token ids of the prompt after the first `shared` ones of the parent's prompt + sample
    rerendered          list<int32>          token ids
    ignored             list<string>         open event
    sampling            string               JSON, open event
    version             string               weight version at the open event
    status              string               name of the end event; null: there was none
    ended               float64              Unix seconds
    ids                 list<int32>          sampled token ids
    logprobs            list<float64>        nats, of `ids`
    spans               list<struct<version: string, first: int32, end: int32>>    over `ids`
    finish_reason error string               end event
    stop_reason         string               JSON (a text or a token id), end event
    version_end         string               weight version at the end event
    delivered           bool                 true: a delivered event; false: an undelivered one
    delivered_t first_byte_s last_byte_s     float64    seconds
    bytes               int64                of the response
    http_status         int32
    response_sha256 reply   string
    usage               string               JSON
    issued              list<string>         ids that the reply gave to its tool calls and items
    kind_seen kind_seen_t                    string, float64    the event that corrects the kind
    extra               string               JSON {event: {field: value}}: what fits no column (fields of newer writers)
    json                string               event rows: the event as it was

The prompt is not expanded: `parent` and `shared` mean the same as in the JSONL. A row gives back exactly the events it was made of. The
file's metadata holds the schema's version and, as JSON, `{"sessions": {id: row group}, "closed": [id …], "taken": {segment: bytes},
"torn": [[segment, bytes] …]}`; all rows of a session are in one row group.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forge_ray.disk import sync
from forge_ray.errors import ForgeRayError
from forge_ray.trajectories.call_log.events import CallEvents, Event
from forge_ray.trajectories.call_log.parts import FOLDER, Part
from forge_ray.trajectories.call_log.problems import TornTail

VERSION = "1"
VERSION_KEY = b"forge_ray.calls"
CONTENT_KEY = b"forge_ray.content"
GROUP_BYTES = 2 * 2**20
"""Size of a row group, as JSON, at which the next session begins another one."""

_S, _F, _I, _B = pa.string(), pa.float64(), pa.int32(), pa.bool_()
_FIELDS: dict[str, dict[str, tuple[str, pa.DataType]]] = {
    # event -> its field -> (column, type)
    "open": {
        **{name: (name, _S) for name in ("session", "replica", "call", "purpose", "dialect", "path", "kind", "conversation")},
        **{name: (name, _S) for name in ("request_sha256", "parent", "splice", "reason", "spawned_by", "model", "version")},
        "t": ("t", _F),
        "streamed": ("streamed", _B),
        "masked_by_grammar": ("masked_by_grammar", _B),
        "shared": ("shared", _I),
        "overlap": ("overlap", _I),
        "max_tokens": ("max_tokens", _I),
        "new": ("new", pa.list_(_I)),
        "rerendered": ("rerendered", pa.list_(_I)),
        "ignored": ("ignored", pa.list_(_S)),
    },
    "end": {
        "event": ("status", _S),
        "t": ("ended", _F),
        "finish_reason": ("finish_reason", _S),
        "error": ("error", _S),
        "version": ("version_end", _S),
        "ids": ("ids", pa.list_(_I)),
        "logprobs": ("logprobs", pa.list_(_F)),
    },
    "delivery": {
        "t": ("delivered_t", _F),
        "first_byte_s": ("first_byte_s", _F),
        "last_byte_s": ("last_byte_s", _F),
        "bytes": ("bytes", pa.int64()),
        "status": ("http_status", _I),
        "response_sha256": ("response_sha256", _S),
        "reply": ("reply", _S),
        "issued": ("issued", pa.list_(_S)),
    },
    "kind": {"kind": ("kind_seen", _S), "t": ("kind_seen_t", _F)},
}
_JSON = {"open": {"sampling": "sampling"}, "end": {"stop_reason": "stop_reason"}, "delivery": {"usage": "usage"}}
_SPANS = pa.list_(pa.struct([pa.field("version", _S), pa.field("first", _I), pa.field("end", _I)]))

_NUMBERS = {"new": "i", "ids": "i", "logprobs": "d"}
"""The long columns, with the type codes of their arrays."""

SCHEMA = pa.schema(
    [
        pa.field("row", _S, nullable=False),
        pa.field("event", _S),
        *(pa.field(column, kind) for fields in _FIELDS.values() for column, kind in fields.values()),
        *(pa.field(column, _S) for columns in _JSON.values() for column in columns.values()),
        pa.field("spans", _SPANS),
        pa.field("delivered", _B),
        pa.field("extra", _S),
        pa.field("json", _S),
    ],
    metadata={VERSION_KEY: VERSION.encode()},
)


class NoPart(ForgeRayError):
    """A file is no part of a call log, or one of a newer version."""


# ---- rows


def call_row(session: str, events: CallEvents) -> dict[str, Any]:
    """The row of a call whose open event is known."""
    row: dict[str, Any] = dict.fromkeys(SCHEMA.names)
    row["row"] = "call"
    extra: dict[str, Event] = {}
    opened = events.open
    assert opened is not None
    found: dict[str, Event | None] = {
        "open": {**opened, "session": session},
        "end": events.end,
        "delivery": events.delivery,
        "kind": events.kind,
    }
    for name, event in found.items():
        for field, value in (event or {}).items():
            column, kind = _FIELDS[name].get(field, (None, None))
            if column is not None and kind is not None and _fits(value, kind):
                row[column] = value
            elif field in _JSON.get(name, {}):
                row[_JSON[name][field]] = _dump(value)
            elif field not in ("event", "call"):
                extra.setdefault(name, {})[field] = value
    row["new"] = np.frombuffer(events.new, dtype=np.int32)
    if events.end is not None:
        row |= {"ids": np.frombuffer(events.ids, dtype=np.int32), "logprobs": np.frombuffer(events.logprobs, dtype=np.float64)}
    if events.spans is not None:
        row["spans"] = [{"version": version, "first": first, "end": end} for version, first, end in events.spans]
    if events.delivery is not None:
        row["delivered"] = events.delivery["event"] == "delivered"
    row["extra"] = _dump(extra) if extra else None
    return row


def event_row(session: str, replica: str, event: Event) -> dict[str, Any]:
    """The row of an event that is in no call's row."""
    row: dict[str, Any] = dict.fromkeys(SCHEMA.names)
    call, t = event.get("call"), event.get("t")
    row |= {"row": "event", "session": session, "replica": replica, "event": event["event"], "json": _dump(event)}
    return row | {"call": call if isinstance(call, str) else None, "t": float(t) if isinstance(t, int | float) else None}


def events(row: dict[str, Any]) -> Iterator[Event]:
    """The events that a row was made of, nulls left out but where a reader of events needs them."""
    if row["row"] == "event":
        yield json.loads(row["json"])
        return
    extra = json.loads(row["extra"]) if row["extra"] else {}
    present = {
        "open": "open",
        "end": row["status"],
        "delivery": None if row["delivered"] is None else ("delivered" if row["delivered"] else "undelivered"),
        "kind": "kind" if row["kind_seen"] is not None else None,
    }
    for name, event in present.items():
        if event is None:
            continue
        found: Event = {"event": event, "call": row["call"]}
        found |= {field: row[column] for field, (column, _) in _FIELDS[name].items() if row[column] is not None}
        found |= {field: json.loads(row[column]) for field, column in _JSON.get(name, {}).items() if row[column] is not None}
        found |= extra.get(name, {})
        if name == "end":
            spans = row["spans"]
            found["spans"] = None if spans is None else [(span["version"], span["first"], span["end"]) for span in spans]
        yield found


def _fits(value: Any, kind: pa.DataType) -> bool:
    """Whether a column of type `kind` gives `value` back as it is."""
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(_fits(item, kind.value_type) for item in value)
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if pa.types.is_floating(kind):
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53)
    if pa.types.is_integer(kind):
        return isinstance(value, int) and abs(value) < 2 ** (kind.bit_width - 1)
    return isinstance(value, str)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# ---- files


class PartWriter:
    """Writes one part: sessions one after the other, then `commit`. Without it nothing is left behind but a hidden file."""

    def __init__(self, directory: Path) -> None:
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        # Names sort by age, and are new without anybody being asked.
        self._path = folder / f"part-{time.time_ns():020d}.parquet"
        self._hidden = folder / f".{self._path.name}"
        repeated: Any = [name for name in SCHEMA.names if name not in ("new", "ids", "logprobs")]
        self._writer = pq.ParquetWriter(self._hidden, SCHEMA, compression="zstd", use_dictionary=repeated, write_page_checksum=True)
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0
        self._group = 0
        self._sessions: dict[str, int] = {}
        self._closed: list[str] = []

    def add(self, session: str, rows: list[dict[str, Any]], *, closed: bool, size: int) -> None:
        """All rows of one session; `size`: bytes of its events as JSON."""
        self._sessions[session] = self._group
        if closed:
            self._closed.append(session)
        self._rows += rows
        self._bytes += size
        if self._bytes >= GROUP_BYTES:
            self._flush()

    def commit(self, taken: dict[str, int], torn: list[TornTail]) -> Part:
        """Give the part its name once it is on disk whole."""
        self._flush()
        content = {
            "sessions": self._sessions,
            "closed": self._closed,
            "taken": taken,
            "torn": [[tail.file.name, tail.bytes] for tail in torn],
        }
        self._writer.add_key_value_metadata({CONTENT_KEY: _dump(content).encode()})
        self._writer.close()
        sync(self._hidden)
        os.rename(self._hidden, self._path)
        for directory in (self._path.parent, self._path.parent.parent):
            sync(directory)
        return read_part(self._path)

    def abandon(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError, pa.ArrowException):  # it may be what failed
            self._writer.close()
        self._hidden.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
            self._rows, self._bytes, self._group = [], 0, self._group + 1


def read_part(path: Path) -> Part:
    """What the file's metadata says. Raises `NoPart`."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        version = metadata.get(VERSION_KEY, b"").decode()
        if version != VERSION:
            raise NoPart(f"a part of version {version or '?'}, not {VERSION}")
        stored = pq.read_metadata(path).metadata or {}
        content = json.loads(stored[CONTENT_KEY])
        torn = tuple(TornTail(path.parent.parent / name, size) for name, size in content["torn"])
        return Part(path, content["sessions"], frozenset(content["closed"]), content["taken"], torn)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise NoPart(f"no part of a call log ({type(error).__name__}: {error})") from error


def read_session(part: Part, session: str) -> list[dict[str, Any]]:
    """The rows of `session`, token ids and logprobs as arrays. Raises `ValueError` where the file cannot be read."""
    try:
        with pq.ParquetFile(part.path, page_checksum_verification=True) as file:
            group = file.read_row_group(part.groups[session])
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{part.path} cannot be read ({error})") from error
    found = group.filter(pc.field("session") == session)
    rows = found.drop_columns(list(_NUMBERS)).to_pylist()
    for column, code in _NUMBERS.items():
        for row, values in zip(rows, _arrays(found[column], code), strict=True):
            row[column] = values
    return rows


def _arrays(column: pa.ChunkedArray, code: str) -> Iterator[array[Any] | None]:
    """The lists of a column of numbers; far cheaper than one Python object per number."""
    for chunk in column.chunks:
        numbers, ends = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        for row, valid in enumerate(chunk.is_valid().to_pylist()):
            yield array(code, numbers[ends[row] : ends[row + 1]].tobytes()) if valid else None


def sessions_of(part: Part, calls: set[str]) -> dict[str, str]:
    """The session of each of `calls` that is in the part."""
    try:
        table = pq.read_table(
            part.path, columns=["call", "session"], filters=[("call", "in", list(calls))], page_checksum_verification=True
        )
    except (OSError, pa.ArrowException) as error:
        raise NoPart(f"{part.path} cannot be read ({error})") from error
    return dict(zip(table["call"].to_pylist(), table["session"].to_pylist(), strict=True))
