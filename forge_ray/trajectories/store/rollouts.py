"""Rollout records as rows of the dataset `rollouts`, and back.

A row says what a rollout came to (its record) and where it came from: what the run knows of all its rollouts (`Origin`), what the calls
tell, and the verifier's output. A record comes back equal; what a newer one has and no column yet goes through `extra`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.store.calls import texts
from forge_ray.trajectories.store.schema import ROLLOUTS

SCHEMA = ROLLOUTS.schema
LOG_HEAD, LOG_TAIL = 8 * 2**10, 24 * 2**10
"""Bytes of a long log that a row keeps, from its beginning and from its end."""

_RENAMED = {"id": "rollout", "task_name": "task", "task": "task_path"}
"""Field of the record -> its column, where they differ."""
_FIELDS = {_RENAMED.get(name, name): name for name in RolloutRecord.model_fields if _RENAMED.get(name, name) in SCHEMA.names}
"""Column -> field of the record."""
_MAPS = ("rewards", "call_rewards", "seconds")
_STORED = frozenset((*SCHEMA.names, ROLLOUTS.partition))


@dataclass(frozen=True)
class Origin:
    """What is the same for all rollouts of a run."""

    run: str
    """Its name."""
    policy: str = ""
    """Name under which the policy is served."""
    template_sha256: str | None = None
    tokenizer_sha256: str | None = None
    harness_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a harness -> its options, JSON values."""


def row(record: RolloutRecord, calls: Sequence[Call], origin: Origin, log: tuple[str | None, int] = (None, 0)) -> dict[str, Any]:
    """The row of one rollout; `log` as `read_log` gives it."""
    said = record.model_dump(mode="json", exclude_defaults=True)
    found: dict[str, Any] = {column: getattr(record, name) for column, name in _FIELDS.items()}
    extra = {name: value for name, value in said.items() if _RENAMED.get(name, name) not in _STORED} | _differs(record, calls)
    versions: Counter[str] = Counter()
    for call in calls:
        for version, first, end in call.spans or ():
            versions[version] += end - first
    sampling = Counter(json.dumps(call.sampling, sort_keys=True) for call in calls)
    return found | {
        "outcome": str(record.outcome),
        "run": origin.run,
        "policy": origin.policy,
        "template_sha256": origin.template_sha256,
        "tokenizer_sha256": origin.tokenizer_sha256,
        "harness_options": json.dumps(origin.harness_options.get(record.harness, {}), sort_keys=True),
        "versions": list(versions.items()),
        "sampling": [text for text, _ in sampling.most_common()],
        "rewards": list(record.rewards.items()),
        "call_rewards": list(record.call_rewards.items()),
        "seconds": list(record.seconds.items()),
        "prompt_tokens": sum(len(call.prompt_ids) for call in calls),
        "sampled_tokens": sum(len(call.ids) for call in calls),
        "trainable_tokens": sum(len(call.ids) for call in calls if call.trainable),
        "verifier_log": log[0],
        "verifier_log_bytes": log[1],
        "extra": json.dumps(extra, sort_keys=True) if extra else None,
    }


def _differs(record: RolloutRecord, calls: Sequence[Call]) -> dict[str, Any]:
    """What the record counted otherwise than the log does (the proxy's count of a call that was being cut at that moment)."""
    return {"sampled_tokens": record.sampled_tokens} if record.sampled_tokens != sum(len(call.ids) for call in calls) else {}


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table of `SCHEMA`."""
    columns = []
    for name in SCHEMA.names:
        values = [entry[name] for entry in rows]
        columns.append(texts(values, SCHEMA.field(name).type))
    return pa.table(columns, schema=SCHEMA)


def records(rows: pa.Table, purpose: Sequence[str]) -> list[RolloutRecord]:
    """The records of the rows; `purpose` of each."""
    known = [column for column in _FIELDS if column in rows.column_names]
    found = []
    for entry, kind in zip(rows.select([*known, "extra"]).to_pylist(), purpose, strict=True):
        fields = {_FIELDS[column]: entry[column] for column in known}
        fields |= {"purpose": kind, **{name: dict(entry[name] or ()) for name in _MAPS}}
        if entry["extra"]:
            fields |= json.loads(entry["extra"])
        found.append(RolloutRecord.model_validate({name: fields[name] for name in RolloutRecord.model_fields if name in fields}))
    return found


def read_log(file: Path) -> tuple[str | None, int]:
    """A log as text and its size in bytes: both ends of a long one, U+FFFD for what is no UTF-8; (None, 0) where there is none."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            if size <= LOG_HEAD + LOG_TAIL:
                return opened.read().decode(errors="replace"), size
            head = opened.read(LOG_HEAD)
            opened.seek(-LOG_TAIL, 2)
            tail = opened.read()
    except OSError:
        return None, 0
    left = size - LOG_HEAD - LOG_TAIL
    return f"{head.decode(errors='replace')}\n[… {left} bytes left out …]\n{tail.decode(errors='replace')}", size
