"""A trajectory: the calls of one rollout as arrays, with the credit of each. What the builders read.

No Python object stands for a token: a call holds its own tokens as numpy arrays, its prompt as (parent, shared, new), so a trajectory is
as large as its unique tokens however often they were sent. It is made of a table of the calls dataset (`of_table`) or of `Call`s
(`of_calls`), which give the same trajectory.

Invariants: calls are by completion, each id once (a call that was recorded twice counts once); a parent's index is another call of the same
trajectory; a call that is trained was sampled by the engine: it has a prompt, a temperature above 0, and a logprob and a version step for
each of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from forge_ray.errors import ForgeRayError
from forge_ray.trajectories.call import WHOLE, Call, version_step
from forge_ray.trajectories.store.calls import arrays


class TrajectoryError(ForgeRayError):
    """A recorded call that cannot be trained although it says it can, or calls that do not belong together."""


@dataclass(frozen=True)
class Share:
    """What the loss gets of a trained call."""

    advantage: float
    weight: float
    """Factor of everything the loss has at its tokens; 0: sampled and chosen, but not in the loss (a degenerate group)."""


@dataclass(slots=True)
class Recorded:
    """One call: what credit looks at, and its tokens."""

    id: str
    kind: str
    status: str
    ended: float | None
    delivered: bool | None
    superseded_by: str | None
    trainable: bool
    temperature: float
    parent: int
    """Index of the call whose prompt and sampled ids the prompt begins with; -1: none."""
    shared: int
    new: np.ndarray
    """int32: the prompt's tokens after the first `shared`."""
    ids: np.ndarray
    """int32, (m,): sampled."""
    logprobs: np.ndarray
    """float32, (m,), nats."""
    steps: np.ndarray
    """int32, (m,): version step of the weights that sampled the token; of another length where versions are unknown."""

    @property
    def prompt_tokens(self) -> int:
        return self.shared + len(self.new)


@dataclass
class Trajectory:
    """The calls of one rollout, and what samples say of it."""

    rollout: str
    calls: list[Recorded]
    """By completion: an index is the ordinal."""
    shares: dict[int, Share] = field(default_factory=dict)
    """By ordinal: the calls that are trained."""
    group: int | None = None
    task: str = ""
    harness: str = ""
    reward: float | None = None

    def check(self) -> None:
        """Raise `TrajectoryError` where a trained call contradicts itself."""
        for ordinal in self.shares:
            call = self.calls[ordinal]
            name = f"call {call.id} of session {self.rollout}"
            if not call.trainable:
                raise TrajectoryError(f"{name} is not trainable")
            if not call.prompt_tokens:
                raise TrajectoryError(f"{name} has an empty prompt")
            if not (call.temperature > 0 and math.isfinite(call.temperature)):
                raise TrajectoryError(f"{name} was sampled at temperature {call.temperature}: it has no gradient")
            if len(call.steps) != len(call.ids):
                raise TrajectoryError(f"{name}: its version spans do not cover its {len(call.ids)} tokens")

    def lineage(self) -> list[int]:
        """Ordinals, every parent before its children (a parent may have ended later). Raises `TrajectoryError` for a circle."""
        order: list[int] = []
        placed = [False] * len(self.calls)
        for ordinal in range(len(self.calls)):
            chain: list[int] = []
            while ordinal >= 0 and not placed[ordinal]:
                if len(chain) > len(self.calls):
                    raise TrajectoryError(f"session {self.rollout}: call {self.calls[ordinal].id} is its own ancestor")
                chain.append(ordinal)
                ordinal = self.calls[ordinal].parent
            for one in reversed(chain):
                placed[one] = True
                order.append(one)
        return order


def of_calls(rollout: str, calls: Sequence[Call], **facts: Any) -> Trajectory:
    """`calls` by completion; `facts`: further fields of `Trajectory`."""
    once = list({call.id: call for call in calls}.values())
    places = {call.id: place for place, call in enumerate(once)}
    found = []
    for call in once:
        parent = places.get(call.parent or "", -1)
        shared = call.shared if parent >= 0 else 0
        found.append(
            Recorded(
                id=call.id,
                kind=call.kind,
                status=call.status,
                ended=call.ended,
                delivered=call.delivered,
                superseded_by=call.superseded_by,
                trainable=call.trainable,
                temperature=call.temperature,
                parent=parent if shared else -1,
                shared=shared,
                new=np.array(call.prompt_ids[shared:], np.int32),
                ids=np.array(call.ids, np.int32),
                logprobs=np.array(call.logprobs, np.float32),
                steps=_steps(call.spans or ()),
            )
        )
    return Trajectory(rollout, found, **facts)


def of_table(
    table: pa.Table, *, train_grammar_calls: bool = False, facts: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Trajectory]:
    """The trajectories of a table of the calls dataset (`store.schema.CALLS`), in the order of their first rows.

    `facts`: by rollout, further fields of `Trajectory`. Token arrays are views of the table's own buffers.
    """
    table = table.combine_chunks()

    def plain(name: str) -> list[Any]:
        return table.column(name).to_pylist()

    new, ids, logprobs = (arrays(table.column(name)) for name in ("new", "ids", "logprobs"))
    steps = _table_steps(table)
    by_rollout: dict[str, list[int]] = {}
    rollouts, ordinals = plain("rollout"), plain("ordinal")
    for row, rollout in enumerate(rollouts):
        by_rollout.setdefault(rollout, []).append(row)
    names = ("call", "kind", "status", "ended", "delivered", "superseded_by", "temperature", "parent", "shared")
    names += ("masked_by_grammar", "quarantined")
    calls, kinds, statuses, ended, delivered, superseded, temperatures, parents, shared, grammar, quarantined = map(plain, names)
    known = (~np.asarray(table.column("spans").is_null())).tolist()
    seen = [bool(media) for media in plain("media")]
    found = []
    for rollout, rows in by_rollout.items():
        rows = list({calls[row]: row for row in sorted(rows, key=ordinals.__getitem__)}.values())
        places = {calls[row]: place for place, row in enumerate(rows)}
        recorded = []
        for row in rows:
            parent = places.get(parents[row], -1) if shared[row] else -1
            if shared[row] and parent < 0:
                raise TrajectoryError(f"call {calls[row]} of session {rollout}: its parent {parents[row]} is not among the calls")
            recorded.append(
                Recorded(
                    id=calls[row],
                    kind=kinds[row],
                    status=statuses[row],
                    ended=ended[row],
                    delivered=delivered[row],
                    superseded_by=superseded[row],
                    # As `Call.trainable` has it: the column holds it without what the run's config lifts.
                    trainable=(
                        statuses[row] in WHOLE
                        and delivered[row] is True
                        and superseded[row] is None
                        and (train_grammar_calls or not grammar[row])
                        and not seen[row]
                        and known[row]
                        and not quarantined[row]
                        and len(ids[row]) == len(logprobs[row]) > 0
                    ),
                    temperature=temperatures[row],
                    parent=parent,
                    shared=shared[row],
                    new=new[row],
                    ids=ids[row],
                    logprobs=logprobs[row],
                    steps=steps[row],
                )
            )
        found.append(Trajectory(rollout, recorded, **(facts or {}).get(rollout, {})))
    return found


def _table_steps(table: pa.Table) -> list[np.ndarray]:
    """The version step of every sampled token, by row."""
    column: Any = table.column("spans").combine_chunks()
    spans: Any = column.values
    labels = spans.field("version").dictionary_encode()
    of_label = np.array([version_step(label) for label in labels.dictionary.to_pylist()] or [0], np.int32)
    of_span = of_label[labels.indices.to_numpy(zero_copy_only=False)]
    first, end = (spans.field(name).to_numpy(zero_copy_only=False) for name in ("first", "end"))
    offsets = column.offsets.to_numpy(zero_copy_only=False).tolist()
    return [_joined(of_span[low:high], first[low:high], end[low:high]) for low, high in pairwise(offsets)]


def _steps(spans: Iterable[tuple[str, int, int]]) -> np.ndarray:
    spans = list(spans)
    first, end = (np.array([span[place] for span in spans], np.int64) for place in (1, 2))
    return _joined(np.array([version_step(label) for label, *_ in spans], np.int32), first, end)


def _joined(steps: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Steps of spans, repeated; empty where the spans leave a hole or overlap."""
    if not len(steps) or first[0] != 0 or (first[1:] != end[:-1]).any():
        return np.zeros(0, np.int32)
    return np.repeat(steps, end - first)
