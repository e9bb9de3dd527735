"""Credit: what a trajectory's advantage is worth at each of its calls (OpenForgeRL, Eq. 1).

`r_t = gamma^(T-t) r_T`: call t of T gets the terminal reward, discounted by the calls after it. The calls are ordered by
completion and counted as the harness lived them: whole replies that reached it and were not replaced by a retry, of a kind whose
weight is above 0 (a title request that ends last does not push the answer back). A call that is counted but may not be trained
(grammar, scope) keeps its place in the count.

The discount multiplies the advantage; the weight of a call's kind multiplies everything the loss has at its tokens, KL included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from forge_ray.trajectories.call import Call

Scope = Literal["all", "outermost", "last"]
KIND_WEIGHTS: dict[str, float] = {"agent": 1.0, "subagent": 1.0, "compaction": 1.0, "aux": 0.0}
"""Defaults of `train.kind_weights`."""


@dataclass(frozen=True)
class Credit:
    """Factors of one trained call."""

    discount: float
    """gamma^(T-t)."""
    weight: float
    """w_kind, above 0."""


def by_completion(calls: Iterable[Call]) -> list[Call]:
    """Calls in the order in which they ended (unended last, ties by id): the order that ordinals count in."""
    return sorted(calls, key=lambda call: (call.ended is None, call.ended or 0.0, call.id))


def rewards(calls: list[Call], terminal: float, gamma: float, kind_weights: Mapping[str, float] | None = None) -> dict[int, float]:
    """Eq. 1: r_t of every counted call, by ordinal."""
    counted = _counted(calls, kind_weights)
    return {ordinal: terminal * gamma ** (len(counted) - 1 - place) for place, ordinal in enumerate(counted)}


def assign(
    calls: list[Call], *, gamma: float = 1.0, kind_weights: Mapping[str, float] | None = None, scope: Scope = "all"
) -> dict[int, Credit]:
    """Credit of every call that is trained, by ordinal in `calls` (which are by completion).

    `scope`: `all`; `outermost`, calls of kind `agent`; `last`, the last counted call. Calls out of scope, not trainable or of
    weight 0 are absent: masked, not rewarded with zero.
    """
    discounts = rewards(calls, 1.0, gamma, kind_weights)
    last = max(discounts, default=None)
    chosen: dict[int, Credit] = {}
    for ordinal, discount in discounts.items():
        call = calls[ordinal]
        in_scope = scope == "all" or (scope == "outermost" and call.kind == "agent") or (scope == "last" and ordinal == last)
        if in_scope and call.trainable:
            chosen[ordinal] = Credit(discount, _weight(call, kind_weights))
    return chosen


def _weight(call: Call, kind_weights: Mapping[str, float] | None) -> float:
    return {**KIND_WEIGHTS, **(kind_weights or {})}.get(call.kind, 1.0)


def _counted(calls: list[Call], kind_weights: Mapping[str, float] | None) -> list[int]:
    return [
        ordinal
        for ordinal, call in enumerate(calls)
        if call.status in ("finished", "length")
        and call.delivered is not False
        and call.superseded_by is None
        and _weight(call, kind_weights) > 0
    ]
