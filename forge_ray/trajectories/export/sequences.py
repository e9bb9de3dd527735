"""Token sequences of rollouts, with what was recorded about each token: what other trainers take.

A rollout that a step trained gives the rows of that step's batch (its own builder, its own advantages). One that no step trained is merged
by the `chain` builder, its trainable calls masked 1, and has no advantage. A batch of tries gives the sequences of its chains with the
tries' advantages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.builders import build
from forge_ray.trajectories.store.calls import arrays
from forge_ray.trajectories.trajectory import Share, Trajectory, of_table


@dataclass(frozen=True)
class Tokens:
    """One sequence of T tokens; the first `prompt` of them come before the first that is trained."""

    ids: np.ndarray
    """int32, (T,)."""
    mask: np.ndarray
    """bool, (T,): sampled by a call that is trained."""
    logprobs: np.ndarray
    """float32, (T,), nats; 0 where the mask is false."""
    advantages: np.ndarray | None
    """float32, (T,); 0 where the mask is false or the weight is 0. None: no step trained it."""
    sample: int
    samples: int

    @property
    def prompt(self) -> int:
        return int(self.mask.argmax()) if self.mask.any() else len(self.ids)

    @property
    def advantage(self) -> float | None:
        """Of the trajectory: that of the sequence's last trained token (no discount with gamma 1: the same at each)."""
        if self.advantages is None:
            return None
        return float(self.advantages[np.flatnonzero(self.mask)[-1]]) if self.mask.any() else 0.0


def of_batch(table: pa.Table, rollouts: Iterable[str]) -> Iterator[tuple[str, Tokens]]:
    """The rows of a step's batch (`trajectories.schema`) that belong to `rollouts`."""
    wanted = set(rollouts)
    names = table["rollout"].to_pylist()
    ids, logprobs, weights, advantages = (arrays(table[name]) for name in ("ids", "logprobs", "weight", "advantage"))
    mask: Any = table["mask"].combine_chunks()
    offsets, bits = mask.offsets.to_numpy().tolist(), mask.values.to_numpy(zero_copy_only=False)
    samples, number = table["samples"].to_pylist(), table["sample"].to_pylist()
    for at, name in enumerate(names):
        if name in wanted:
            chosen = bits[offsets[at] : offsets[at + 1]]
            yield name, Tokens(ids[at], chosen, logprobs[at], advantages[at] * (weights[at] > 0), number[at], samples[at])


def of_trajectories(found: Sequence[Trajectory], *, trained: bool) -> Iterator[tuple[str, Tokens]]:
    """Trajectories merged by `chain`; `trained`: their shares hold advantages."""
    for name, made in of_batch(build("chain", found), {trajectory.rollout for trajectory in found}):
        yield name, made if trained else Tokens(made.ids, made.mask, made.logprobs, None, made.sample, made.samples)


def untrained(rows: pa.Table, *, train_grammar_calls: bool = False) -> list[Trajectory]:
    """Trajectories of rows of the dataset `calls`, every call with a gradient chosen."""
    found = of_table(rows, train_grammar_calls=train_grammar_calls)
    for trajectory in found:
        trajectory.shares.update({ordinal: Share(0.0, 1.0) for ordinal, call in enumerate(trajectory.calls) if _has_gradient(call)})
    return found


def of_tries(table: pa.Table, rows: pa.Table, *, train_grammar_calls: bool = False) -> list[Trajectory]:
    """Trajectories of rows of the dataset `calls`, with the shares that a step's tries (`trajectories.tree_schema`) give their calls."""
    shares: dict[str, dict[int, Share]] = {}
    for trie in table.to_pylist():
        for owner, call, advantage, weight in zip(trie["owner"], trie["call"], trie["advantage"], trie["weight"], strict=True):
            shares.setdefault(trie["rollouts"][owner], {}).setdefault(call, Share(advantage, weight))
    found = of_table(rows, train_grammar_calls=train_grammar_calls)
    for trajectory in found:
        trajectory.shares.update(shares.get(trajectory.rollout, {}))
    return found


def facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of the rollout goes with each sequence."""
    return {name: row[name] for name in ("rollout", "task", "harness", "group", "step", "reward", "outcome", "purpose")}


def _has_gradient(call: Any) -> bool:
    return (
        call.trainable
        and call.prompt_tokens > 0
        and call.temperature > 0
        and math.isfinite(call.temperature)
        and len(call.steps) == len(call.ids)
    )
