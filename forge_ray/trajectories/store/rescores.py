"""The dataset `rescores`: verdicts that were made later, on archived workspaces. Rows are only added; the recorded rewards stay.

    rescores/purpose=train/<rescore>-0000.parquet

`rescore` names one call of `forge-ray rollouts rescore`; its ids sort by time. A rollout may have any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from forge_ray.outcome import RATED, Outcome
from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories.store.location import SUFFIX, Location
from forge_ray.trajectories.store.schema import RESCORES, StoreError
from forge_ray.trajectories.store.writer import parquet

RECORDED, LATEST = "recorded", "latest"
"""Which rewards a reader wants, beside the id of one rescore."""
_VERDICTS = frozenset({*RATED, Outcome.VERIFIER})


@dataclass(frozen=True)
class Rescored:
    """One later verdict on one rollout."""

    rescore: str
    rollout: str
    purpose: str
    task: str
    harness: str
    workspace_digest: str
    at: float
    """Unix seconds."""
    by: str
    """user@host"""
    outcome_before: Outcome
    reward_before: float | None
    outcome: Outcome
    """ok and truncated have a reward; verifier: the new verdict failed; task and sandbox: there is none, the rollout stays as it was."""
    detail: str
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    call_rewards: dict[str, float] = field(default_factory=dict)
    verifier_digest: str | None = None
    """Of the task that judged, as Harbor counts it."""
    reward_digest: str | None = None
    """Of the reward function's sources."""
    weights: dict[str, float] = field(default_factory=dict)
    """`rollouts.reward_weights`."""

    @property
    def changed(self) -> bool:
        """Whether the verdict is another one."""
        return self.outcome in _VERDICTS and (self.outcome, self.reward) != (self.outcome_before, self.reward_before)

    def applied(self, record: RolloutRecord) -> RolloutRecord:
        """`record` with this verdict in the place of its own."""
        if self.outcome not in _VERDICTS:
            return record
        return record.model_copy(
            update={
                "outcome": self.outcome,
                "detail": self.detail,
                "reward": self.reward,
                "rewards": self.rewards,
                "call_rewards": self.call_rewards,
                "reward_digest": self.reward_digest,
            }
        )


def put(location: Location, number: int, rows: Iterable[Rescored]) -> None:
    """Store the rows of one rescore, its part `number`. Raises `StoreError`."""
    by_purpose: dict[str, list[Rescored]] = {}
    for row in rows:
        by_purpose.setdefault(row.purpose, []).append(row)
    for purpose, some in by_purpose.items():
        name = f"{RESCORES.name}/purpose={purpose}/{some[0].rescore}-{number:04d}{SUFFIX}"
        location.put(name, parquet(_table(some)))


def _table(rows: list[Rescored]) -> pa.Table:
    schema = RESCORES.schema
    columns = []
    for name in schema.names:
        values = [getattr(row, name) for row in rows]
        if name in ("rewards", "call_rewards", "weights"):
            values = [list(value.items()) for value in values]
        elif name in ("outcome", "outcome_before"):
            values = [str(value) for value in values]
        columns.append(pa.array(values, schema.field(name).type))
    return pa.table(columns, schema=schema)


def rows(table: pa.Table) -> list[Rescored]:
    """Rows of the dataset, with its column `purpose`, by time."""
    found = []
    for entry in table.select([*RESCORES.schema.names, "purpose"]).to_pylist():
        entry |= {name: dict(entry[name]) for name in ("rewards", "call_rewards", "weights")}
        entry |= {name: Outcome(entry[name]) for name in ("outcome", "outcome_before")}
        found.append(Rescored(**entry))
    return sorted(found, key=lambda row: (row.at, row.rescore, row.rollout))


def choose(found: Iterable[Rescored], which: str) -> dict[str, Rescored]:
    """Rollout → the verdict that `which` means: `recorded` (none), `latest`, or the id of one. Raises `StoreError`."""
    if which == RECORDED:
        return {}
    every = list(found)
    if which != LATEST:
        chosen = [row for row in every if row.rescore == which]
        if not chosen:
            known = sorted({row.rescore for row in every})
            raise StoreError(f"there is no rescore {which!r}; there is {', '.join(known[-5:]) or 'none'}")
        every = chosen
    return {row.rollout: row for row in every if row.outcome in _VERDICTS}


def apply(records: Iterable[RolloutRecord], verdicts: Mapping[str, Rescored]) -> list[RolloutRecord]:
    """The records with these verdicts."""
    return [verdicts[record.id].applied(record) if record.id in verdicts else record for record in records]


def ended_before(record: RolloutRecord) -> Outcome | None:
    """How the harness had ended before verification; None where it was never verified."""
    if record.ended is not None:
        return record.ended
    if record.outcome in RATED:
        return record.outcome
    if record.outcome is Outcome.VERIFIER:  # a record from before that was noted says it in words
        return Outcome.TRUNCATED if "(the rollout before it: truncated" in record.detail else Outcome.OK
    return None
