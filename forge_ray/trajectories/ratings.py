"""What a teacher is asked about a group, and what its answer says of each call. Pure; no server, no store.

The policy has sampled, the teacher rates: its log-probability of each sampled token, in the context that the engine had. A sequence is sent
as token ids and holds every trained call that extends it (the samples of the `chain` builder), so that what calls share is computed once.

Invariant: a rating belongs to the tokens of one call, one number for each, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forge_ray.config import Train
from forge_ray.errors import ForgeRayError, UserError
from forge_ray.trajectories import batch, credit
from forge_ray.trajectories.store.calls import arrays


class RatingError(ForgeRayError):
    """A rating that is not one of the tokens it is said to be of."""


@dataclass(frozen=True)
class Rating:
    """What a teacher says of one call."""

    rollout: str
    call: str
    """Its id."""
    ordinal: int
    """Its place among the rollout's calls by completion."""
    logprobs: np.ndarray
    """float32, (m,): nats, of the call's sampled tokens."""


@dataclass(frozen=True)
class Asked:
    """One sequence that is rated."""

    rollout: str
    ids: np.ndarray
    """int32, (T,): what the engine saw and sampled."""
    calls: Mapping[int, str]
    """Ids of its trained calls, by ordinal."""
    sampled_by: np.ndarray
    """int32, (T,): ordinal of the trained call that sampled the token, else -1."""

    def ratings(self, logprobs: np.ndarray) -> list[Rating]:
        """Of each call. `logprobs`, (T,): the teacher's, of every token given those before it; that of the first is not looked at."""
        return [
            Rating(self.rollout, call, ordinal, logprobs[self.sampled_by == ordinal].astype(np.float32))
            for ordinal, call in self.calls.items()
        ]


def sequences(group: batch.Group, train: Train, known: Mapping[tuple[str, str], Rating]) -> list[Asked]:
    """What of a group is to be rated: its trained calls, but for those that are `known` by rollout and call id.

    Raises `UserError` where one was not sampled at temperature 1: a server rates at that alone."""
    calls = {record.id: credit.by_completion(calls) for record, calls in group}
    table = batch.build_step([group], train.model_copy(update={"builder": "chain"})).table.combine_chunks()
    columns = [arrays(table["ids"]), arrays(table["call"]), arrays(table["weight"])]
    found = []
    for rollout, ids, call, weight in zip(table["rollout"].to_pylist(), *columns, strict=True):
        wanted = {int(ordinal): calls[rollout][ordinal].id for ordinal in np.unique(call[weight > 0])}
        for ordinal, name in wanted.items():
            if (temperature := calls[rollout][ordinal].temperature) != 1.0:
                raise UserError(
                    f"call {name} of rollout {rollout} was sampled at temperature {temperature:g}, and a server rates at 1",
                    where="train.loss.distillation.upstream",
                    fix="sample at 1 (policy.sampling.temperature), or give the teacher's model directory (teacher)",
                )
        if any((rollout, name) not in known for name in wanted.values()):
            found.append(Asked(rollout, ids, wanted, np.where(weight > 0, call, -1)))
    return found


def gathered(rollouts: Sequence[str], owner: np.ndarray, call: np.ndarray, found: Mapping[tuple[str, int], np.ndarray]) -> np.ndarray:
    """The teacher's log-probabilities, float32 (n,), of tokens that are given by their rollout (`owner`: index into `rollouts`) and call
    (ordinal), both (n,), a call's tokens whole and in their order. `found`: by rollout and ordinal. Raises `RatingError`."""
    values = np.zeros(len(owner), np.float32)
    order = np.lexsort((np.arange(len(owner)), call, owner))
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1) | np.diff(call[order], prepend=-1)) if len(order) else order
    for places in np.split(order, starts[1:]) if len(order) else ():
        key = (rollouts[int(owner[places[0]])], int(call[places[0]]))
        rated = found.get(key)
        if rated is None or len(rated) != len(places):
            what = "no rating" if rated is None else f"a rating of {len(rated)} tokens"
            raise RatingError(f"call {key[1]} of rollout {key[0]} has {len(places)} tokens in the loss and {what} of the teacher's")
        values[places] = rated
    return values
