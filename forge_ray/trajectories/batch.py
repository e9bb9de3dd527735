"""The step batch: groups of finished rollouts become one table of samples, with advantage and weight per token.

`build_step` takes the groups whole, as they were admitted; who is left out because of its outcome was decided before. What is still
caught here: a rollout without a usable reward never counts (an infrastructure failure is not a reward of 0), a rollout of evaluation
or one that stands twice in the batch is refused.

Rows of a degenerate group stay in the table with weight 0, so that the file tells what happened; the learner skips them.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from forge_ray.config import Train
from forge_ray.errors import ForgeRayError
from forge_ray.outcome import RATED, Outcome
from forge_ray.rollout import RolloutRecord, usable, usable_of
from forge_ray.trajectories import credit
from forge_ray.trajectories.advantage import group_advantages
from forge_ray.trajectories.builders import BUILDERS
from forge_ray.trajectories.call import Call, version_step
from forge_ray.trajectories.continuity import continuity
from forge_ray.trajectories.sample import Sample
from forge_ray.trajectories.schema import SCHEMA

Group = Sequence[tuple[RolloutRecord, list[Call]]]
COUNTS = (
    "groups_degenerate",
    "rollouts_invalid",
    "rollouts_untrained",
    "rollouts_trained",
    "calls",
    "calls_trained",
    "tokens",
    "tokens_trained",
)


class BatchError(ForgeRayError):
    """Rollouts that cannot be one step batch."""


@dataclass
class StepBatch:
    """What one step trains on."""

    table: pa.Table
    """Rows of `schema.SCHEMA`, by group, rollout and sample in the order given."""
    stats: dict[str, Any] = field(default_factory=dict)
    """Numbers for the metrics line, and one text.

    Counts: `groups`, `groups_degenerate`, `rollouts`, `rollouts_invalid` (no usable reward), `rollouts_untrained` (valid, without
    a trainable token), `rollouts_trained`, `calls`, `calls_trained`, `samples`, `tokens` (of the rows in the loss),
    `tokens_trained` (those with weight). Means, absent where there is nothing to average: `reward_mean`, `reward_std` over valid
    rollouts, `reward/<name>` of each further number of the verifier over the rollouts that have it, `samples_per_rollout` over
    rollouts with samples. Of the valid rollouts, how their calls continue one another: see `continuity`. With a version: `staleness_max`,
    `staleness_mean` of the tokens in the loss, in weight updates."""


def build_step(groups: Sequence[Group], config: Train, *, version: int | None = None) -> StepBatch:
    """Group statistics, credit and samples of every group; see the module. `version`: weight updates so far, for the staleness numbers."""
    _check(groups, config)
    rows: list[dict[str, Any]] = []
    stats: dict[str, Any] = defaultdict(float)
    stats.update(dict.fromkeys(COUNTS, 0))
    named: dict[str, list[float]] = defaultdict(list)
    valid: list[float] = []
    lived: list[list[Call]] = []
    built: set[str] = set()
    ordered = [[(record, credit.by_completion(calls)) for record, calls in group] for group in groups]
    numbers = [[trajectory_reward(record, calls, config) for record, calls in group] for group in ordered]
    results = group_advantages(numbers, config.advantage.name)
    for group, result in zip(ordered, results, strict=True):
        stats["groups_degenerate"] += result.degenerate
        for (record, calls), value, trained in zip(group, result.advantages, result.trained, strict=True):
            stats["calls"] += len(calls)
            reward = reward_of(record)
            if reward is None:
                stats["rollouts_invalid"] += 1
                continue
            valid.append(reward)
            lived.append(calls)
            for name, number in record.rewards.items():
                named[name].append(number)
            credits = credit.assign(calls, config.credit, truncated=record.outcome == Outcome.TRUNCATED)
            samples = BUILDERS[config.builder](calls, credits)
            if not samples:
                stats["rollouts_untrained"] += 1
                continue
            built.add(record.id)
            new = _rows(record, reward, samples, credits, value if trained else None)
            rows += new
            if trained:
                stats["rollouts_trained"] += 1
                stats["calls_trained"] += len(credits)
                stats["tokens"] += sum(len(sample) for sample in samples)
                stats["tokens_trained"] += sum(sample.trained for sample in samples)
    stats |= {"groups": len(groups), "rollouts": sum(len(group) for group in groups), "samples": len(rows)}
    stats |= continuity(lived)
    if built:
        stats["samples_per_rollout"] = len(rows) / len(built)
    if valid:
        stats["reward_mean"] = statistics.fmean(valid)
        stats["reward_std"] = statistics.pstdev(valid)
    for name, numbers in sorted(named.items()):
        if name != "reward" and (numbers := usable_of(numbers)):
            stats[f"reward/{name}"] = statistics.fmean(numbers)
    table = step_table(rows)
    if version is not None:
        stats["staleness_max"], stats["staleness_mean"] = staleness(table, version)
    return StepBatch(table, dict(stats))


def reward_of(record: RolloutRecord) -> float | None:
    """The terminal reward that may enter group statistics: None unless the outcome is rated and the number `usable`."""
    if record.outcome not in RATED or not usable(record.reward):
        return None
    return record.reward


def trajectory_reward(record: RolloutRecord, calls: Sequence[Call], config: Train) -> float | None:
    """The number of a rollout that enters group statistics, `calls` by completion; None where it has no usable reward."""
    reward = reward_of(record)
    if reward is None:
        return None
    return credit.trajectory_reward(calls, reward, config.credit, truncated=record.outcome == Outcome.TRUNCATED)


def step_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows (column name → value) as a table of `SCHEMA`; no row gives an empty table of the same schema."""
    columns = {name: [row[name] for row in rows] for name in SCHEMA.names}
    return pa.table({name: pa.array(values, SCHEMA.field(name).type) for name, values in columns.items()}, schema=SCHEMA)


def oldest_step(record: RolloutRecord, calls: Iterable[Call], config: Train) -> int | None:
    """Version step of the oldest token that training this rollout would use; None where it would use none."""
    ordered = credit.by_completion(calls)
    chosen = credit.assign(ordered, config.credit, truncated=record.outcome == Outcome.TRUNCATED)
    return min((version_step(label) for ordinal in chosen for label, *_ in ordered[ordinal].spans or ()), default=None)


def group_staleness(group: Group, version: int, config: Train) -> int:
    """`version` minus the version step of the oldest token that training this group would use; 0 where it would use none.

    This is the exact test at consumption: it looks at the tokens, not at when their rollout began.
    """
    steps = [oldest_step(record, calls, config) for record, calls in group if reward_of(record) is not None]
    return max((version - step for step in steps if step is not None), default=0)


def staleness(table: pa.Table, version: int) -> tuple[int, float]:
    """(largest, mean) of `version` minus the version step of each token in the loss; (0, 0.0) where there is none."""
    steps = _flat(table, "steps")[_flat(table, "weight") > 0]
    if not len(steps):
        return 0, 0.0
    lags = version - steps.astype(np.int64)
    return int(lags.max()), float(lags.mean())


def split(table: pa.Table, parts: int) -> list[pa.Table]:
    """`parts` tables with every row once: whole trajectories, balanced by the tokens that are forwarded. Parts may be empty."""
    trajectories: dict[str, list[int]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    lengths = _lengths(table)
    weights = _flat(table, "weight") > 0
    ends = np.cumsum(lengths)
    for row, name in enumerate(table.column("rollout").to_pylist()):
        trajectories[name].append(row)
        if weights[ends[row] - lengths[row] : ends[row]].any():
            sizes[name] += int(lengths[row])
    names = list(trajectories)
    shares = partition([sizes[name] for name in names], parts)
    return [table.take(pa.array([row for index in share for row in trajectories[names[index]]], pa.int64())) for share in shares]


def partition(sizes: Sequence[int], parts: int, *, seed: int | str | None = None) -> list[list[int]]:
    """Indices of `sizes` in `parts` lists of near-equal sums, each in rising order; a pure function of its arguments.

    Largest first into the emptiest part. With `seed`, in a random order instead: another composition for each pass over the data.
    """
    order = list(range(len(sizes)))
    if seed is None:
        order.sort(key=lambda index: (-sizes[index], index))
    else:
        random.Random(f"partition {seed}").shuffle(order)
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, 0)] * parts
    for index in order:
        # The number of items breaks ties, so that items of size 0 spread as well.
        part = min(range(parts), key=lambda p: (*loads[p], p))
        shares[part].append(index)
        loads[part] = (loads[part][0] + sizes[index], loads[part][1] + 1)
    return [sorted(share) for share in shares]


def _rows(
    record: RolloutRecord, reward: float, samples: list[Sample], credits: dict[int, credit.CallCredit], advantage: float | None
) -> list[dict[str, Any]]:
    """Rows of one rollout; `advantage` None: kept with weight 0."""
    rows = []
    for index, sample in enumerate(samples):
        of_token = [credits[ordinal] if ordinal >= 0 and advantage is not None else None for ordinal in sample.call]
        rows.append(
            {
                "rollout": record.id,
                "group": record.group,
                "task": record.task_name,
                "harness": record.harness,
                "sample": index,
                "samples": len(samples),
                "ids": sample.ids,
                "mask": sample.mask,
                "logprobs": sample.logprobs,
                "steps": sample.steps,
                "temperature": sample.temperature,
                "call": sample.call,
                "advantage": [0.0 if given is None else given.discount * (advantage or 0.0) for given in of_token],
                "weight": [0.0 if given is None else given.weight for given in of_token],
                "reward": reward,
            }
        )
    return rows


def _check(groups: Sequence[Group], config: Train) -> None:
    seen: set[str] = set()
    mixed = config.advantage.group_by == "task"
    for group in groups:
        kinds = {(record.group, record.task_name, "" if mixed else record.harness) for record, _ in group}
        if len(kinds) > 1:
            raise BatchError(f"one group holds rollouts of different groups, tasks or harnesses: {sorted(map(str, kinds))}")
        for record, calls in group:
            if record.purpose != "train" or any(call.purpose != "train" for call in calls):
                raise BatchError(f"rollout {record.id} was made for evaluation: it is never trained")
            if record.id in seen:
                raise BatchError(f"rollout {record.id} stands twice in one step batch")
            if any(call.session != record.id for call in calls):
                raise BatchError(f"rollout {record.id} was given calls of another session")
            if len({call.id for call in calls}) != len(calls):
                raise BatchError(f"rollout {record.id} was given a call twice")
            seen.add(record.id)


def _lengths(table: pa.Table) -> np.ndarray:
    return np.asarray(table.column("ids").combine_chunks().value_lengths(), dtype=np.int64)


def _flat(table: pa.Table, column: str) -> np.ndarray:
    return table.column(column).combine_chunks().flatten().to_numpy(zero_copy_only=False)
