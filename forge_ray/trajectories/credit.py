"""Credit: what a rollout's reward is worth at each of its calls (OpenForgeRL, arXiv 2607.21557, Eq. 1).

`r_t = gamma^(T-t) r_T`: call t of T gets the terminal reward, discounted by the calls after it. The calls are ordered by
completion and counted as the harness lived them: whole replies that reached it and were not replaced by a retry, of a kind whose
weight is above 0 (a title request that ends last does not push the answer back). A call that is counted but may not be trained
(grammar, scope) keeps its place in the count.

The discount multiplies the advantage; the weight of a call's kind multiplies everything the loss has at its tokens, KL included.
Group statistics use one number per rollout, never one per call: see `trajectory_reward`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from forge_ray.config.credit import Credit
from forge_ray.trajectories.call import Answered, lived_through

KIND_WEIGHTS: dict[str, float] = {"agent": 1.0, "subagent": 1.0, "compaction": 1.0, "aux": 0.0}
"""Defaults of `train.credit.kind_weights`."""


class Counted(Answered, Protocol):
    """What credit looks at: of a `Call`, or of a row of the calls dataset."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def ended(self) -> float | None: ...
    @property
    def trainable(self) -> bool: ...


C = TypeVar("C", bound=Counted)


@dataclass(frozen=True)
class CallCredit:
    """Factors of one trained call."""

    discount: float
    """gamma^(T-t)."""
    weight: float
    """w_kind, above 0."""


def by_completion(calls: Iterable[C]) -> list[C]:
    """Calls in the order in which they ended (unended last, ties by id): the order that ordinals count in."""
    return sorted(calls, key=lambda call: (call.ended is None, call.ended or 0.0, call.id))


def kind_weights(config: Credit) -> dict[str, float]:
    """Weight of every kind, the defaults included."""
    return {**KIND_WEIGHTS, **{str(kind): weight for kind, weight in config.kind_weights.items()}}


def rewards(calls: Sequence[Counted], terminal: float, config: Credit | None = None) -> dict[int, float]:
    """Eq. 1: r_t of every counted call, by ordinal."""
    config = config or Credit()
    ordinals = counted(calls, config)
    return {ordinal: terminal * config.gamma ** (len(ordinals) - 1 - place) for place, ordinal in enumerate(ordinals)}


def assign(calls: Sequence[Counted], config: Credit | None = None, *, truncated: bool = False) -> dict[int, CallCredit]:
    """Credit of every call that is trained, by ordinal in `calls` (which are by completion).

    `scope`: `all`; `outermost`, calls of kind `agent`; `last`, the last counted call. Calls out of scope, not trainable or of
    weight 0 are absent: masked, not rewarded with zero. `truncated`: the rollout ended at a limit, and `config.truncated` holds.
    """
    config = config or Credit()
    if truncated and config.truncated == "mask":
        return {}
    weights = kind_weights(config)
    discounts = rewards(calls, 1.0, config)
    last = max(discounts, default=None)
    chosen: dict[int, CallCredit] = {}
    for ordinal, discount in discounts.items():
        call = calls[ordinal]
        in_scope = {"all": True, "outermost": call.kind == "agent", "last": ordinal == last}[config.scope]
        cut = truncated and config.truncated == "finished_calls" and call.status != "finished"
        if in_scope and not cut and call.trainable:
            chosen[ordinal] = CallCredit(discount, weights.get(call.kind, 1.0))
    return chosen


def scaled(terminal: float, config: Credit, *, truncated: bool) -> float:
    """r_T, of a rollout that ended at a limit by `config.truncated`."""
    return terminal * config.truncated_scale if truncated and config.truncated == "scale" else terminal


def trajectory_reward(calls: Sequence[Counted], terminal: float, config: Credit | None = None, *, truncated: bool = False) -> float:
    """The one number of a rollout that group statistics use: R_i.

    `statistics: terminal`: r_T. `mean_sample_reward`: the mean of r_t over the trained calls ("the average sample reward of each
    trajectory", the paper's section 3); r_T where there is none. Before that, `truncated: scale` multiplies r_T of a truncated rollout.
    """
    config = config or Credit()
    terminal = scaled(terminal, config, truncated=truncated)
    if config.statistics == "terminal":
        return terminal
    trained = assign(calls, config)  # a truncated rollout counts as if it were trained whole
    return statistics.fmean(terminal * credit.discount for credit in trained.values()) if trained else terminal


def by_ordinal(calls: Sequence[Counted], given: Mapping[str, float], config: Credit | None = None) -> tuple[dict[int, float], list[str]]:
    """Rewards of single calls (`RolloutRecord.call_rewards`) by ordinal, and the keys that name no counted call.

    A key is a call's id, or its place among the counted calls by completion: `"0"` the first, `"-1"` the last.
    """
    ordinals = counted(calls, config or Credit())
    places = {calls[ordinal].id: ordinal for ordinal in ordinals}
    for place, ordinal in enumerate(ordinals):
        places.setdefault(str(place), ordinal)
        places.setdefault(str(place - len(ordinals)), ordinal)
    found: dict[int, float] = {}
    for key, number in given.items():
        if key in places:
            found[places[key]] = found.get(places[key], 0.0) + number
    return found, [key for key in given if key not in places]


def counted(calls: Sequence[Counted], config: Credit) -> list[int]:
    """Ordinals of the calls that Eq. 1 counts: see the module."""
    weights = kind_weights(config)
    return [ordinal for ordinal, call in enumerate(calls) if lived_through(call) and weights.get(call.kind, 1.0) > 0]
