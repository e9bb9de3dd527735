"""The step batch: groups of finished rollouts become one table of samples, with advantage and weight per token.

`build_step` takes the groups whole, as they were admitted; who is left out because of its outcome was decided before. What is still
caught here: a rollout without a usable reward never counts (an infrastructure failure is not a reward of 0), a rollout of evaluation
or one that stands twice in the batch is refused.

Rows of a degenerate group stay in the table with weight 0, so that the file tells what happened; the learner skips them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from forge_ray.config import Credit, Train
from forge_ray.errors import ForgeRayError
from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRecord, passes, reward_of, usable_of
from forge_ray.trajectories import continuity, credit
from forge_ray.trajectories.advantage import group_advantages
from forge_ray.trajectories.builders import build, chain
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.split import flat, tokens
from forge_ray.trajectories.trajectory import Share, Trajectory, of_calls
from forge_ray.trajectories.tree_schema import is_tree

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
    """Rows of `schema.SCHEMA`, by group, rollout and sample in the order given; of builder `tree`, rows of `TREE_SCHEMA`."""
    stats: dict[str, Any] = field(default_factory=dict)
    """Numbers for the metrics line, and one text.

    Counts: `groups`, `groups_degenerate`, `rollouts`, `rollouts_invalid` (no usable reward), `rollouts_untrained` (valid, without
    a trainable token), `rollouts_trained`, `calls`, `calls_trained`, `samples`, `tokens` (of the rows in the loss),
    `tokens_trained` (those with weight). Means, absent where there is nothing to average: `reward_mean`, `reward_std` over valid
    rollouts, `reward/<name>` of each further number of the verifier over the rollouts that have it, `samples_per_rollout` over
    rollouts with samples. Of the valid rollouts, how their calls continue one another: see `continuity`. With a version: `staleness_max`,
    `staleness_mean` of the tokens in the loss, in weight updates, and `staleness_tokens`, their number by staleness. With rollouts of
    several harnesses: `harnesses`, by name `rollouts`, `valid`, and `reward_mean` and `pass_rate` over the valid ones."""


def build_step(groups: Sequence[Group], config: Train, *, version: int | None = None) -> StepBatch:
    """Group statistics, credit and samples of every group; see the module. `version`: weight updates so far, for the staleness numbers."""
    return form([take(group, config) for group in groups], config, version=version)


def take(group: Group, config: Train) -> list[Taken]:
    """A group on its way into a batch. Raises `BatchError`."""
    return [Taken.of(record, calls, config) for record, calls in group]


def form(taken: Sequence[Sequence[Taken]], config: Train, *, version: int | None = None) -> StepBatch:
    """The batch of groups that were taken with the same `config`."""
    _check(taken, config)
    stats: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    results = group_advantages([[one.number for one in group] for group in taken], config.advantage.name)
    single = group_advantages([[reward for one in group for reward in one.rewarded.values()] for group in taken], config.advantage.name)
    trajectories: list[Trajectory] = []
    for group, result, own in zip(taken, results, single, strict=True):
        bonus = iter(zip(own.advantages, own.trained, strict=True))
        told = False
        for one, value, trained in zip(group, result.advantages, result.trained, strict=True):
            extra = {ordinal: advantage for ordinal, (advantage, speaks) in zip(one.rewarded, bonus, strict=False) if speaks}
            # A teacher rates the tokens of a group whose rewards say nothing, too.
            taught = config.loss.distillation is not None and one.reward is not None
            one.share(value if trained or taught else None, extra, config.credit)
            told = told or trained or any(share.weight > 0 for share in one.trajectory.shares.values())
            stats["calls"] += len(one.trajectory.calls)
            if one.reward is None:
                stats["rollouts_invalid"] += 1
            elif not one.trajectory.shares:
                stats["rollouts_untrained"] += 1
            else:
                trajectories.append(one.trajectory)
                in_loss = [share for share in one.trajectory.shares.values() if share.weight > 0]
                stats["rollouts_trained"] += bool(in_loss)
                stats["calls_trained"] += len(in_loss)
        stats["groups_degenerate"] += not told
    table = build(config.builder, trajectories, span=config.tree.span)
    everyone = [one for group in taken for one in group]
    stats |= {"groups": len(taken), "rollouts": len(everyone), "samples": table.num_rows}
    stats["tokens"], stats["tokens_trained"] = tokens(table)
    stats |= continuity.told(one.continues for one in everyone if one.reward is not None)
    if trajectories:
        # A trie has no samples; how often a history was left is told by the chains that it would be.
        made = sum(len(chain.merged(one)) for one in trajectories) if is_tree(table) else table.num_rows
        stats["samples_per_rollout"] = made / len(trajectories)
    stats |= _reward_stats(everyone)
    if len(names := sorted({one.record.harness for one in everyone})) > 1:
        stats["harnesses"] = {name: _harness_stats([one for one in everyone if one.record.harness == name]) for name in names}
    if version is not None:
        stats["staleness_max"], stats["staleness_mean"] = staleness(table, version)
        stats["staleness_tokens"] = staleness_tokens(table, version)
    return StepBatch(table, stats)


@dataclass
class Taken:
    """One rollout on its way into a batch: as large as the new tokens of its calls, however often they were sent."""

    record: RolloutRecord
    trajectory: Trajectory
    reward: float | None
    """r_T; None: not rated, or not usable."""
    number: float | None
    """What enters group statistics."""
    credits: dict[int, credit.CallCredit]
    rewarded: dict[int, float]
    """Own rewards of its trained calls, by ordinal."""
    unknown: int
    """Keys of its own rewards that name no call."""
    continues: continuity.Counts

    @classmethod
    def of(cls, record: RolloutRecord, calls: Sequence[Call], config: Train) -> Taken:
        """Raises `BatchError`."""
        if record.purpose != "train" or any(call.purpose != "train" for call in calls):
            raise BatchError(f"rollout {record.id} was made for evaluation: it is never trained")
        if any(call.session != record.id for call in calls):
            raise BatchError(f"rollout {record.id} was given calls of another session")
        if len({call.id for call in calls}) != len(calls):
            raise BatchError(f"rollout {record.id} was given a call twice")
        reward, continues = reward_of(record), continuity.counts(calls)
        facts = {"group": record.group, "task": record.task_name, "harness": record.harness, "reward": reward}
        trajectory = of_calls(record.id, credit.by_completion(calls), **facts)
        if reward is None:
            return cls(record, trajectory, None, None, {}, {}, 0, continues)
        cut = record.outcome == Outcome.TRUNCATED
        number = credit.trajectory_reward(trajectory.calls, reward, config.credit, truncated=cut)
        credits = credit.assign(trajectory.calls, config.credit, truncated=cut)
        found, unknown = credit.by_ordinal(trajectory.calls, record.call_rewards, config.credit)
        use = config.credit.call_rewards > 0
        rewarded = {ordinal: found[ordinal] for ordinal in sorted(found) if use and ordinal in credits}
        return cls(record, trajectory, reward, number, credits, rewarded, len(unknown), continues)

    @property
    def oldest(self) -> int | None:
        """Version step of the oldest token that training it would use; None where it would use none."""
        steps = (self.trajectory.calls[ordinal].steps for ordinal in self.credits)
        return min((int(some.min()) for some in steps if len(some)), default=None)

    def share(self, advantage: float | None, extra: Mapping[int, float], config: Credit) -> None:
        """Give each call its share: gamma^(T-t) times the rollout's advantage, and that of its own reward; weight 0 where neither is."""
        for ordinal, given in self.credits.items():
            silent = advantage is None and ordinal not in extra
            value = given.discount * (advantage or 0.0) + config.call_rewards * extra.get(ordinal, 0.0)
            self.trajectory.shares[ordinal] = Share(0.0, 0.0) if silent else Share(value, given.weight)


def _reward_stats(rollouts: Sequence[Taken]) -> dict[str, float]:
    valid = [one for one in rollouts if one.reward is not None]
    stats: dict[str, float] = {}
    if valid:
        stats["reward_mean"] = statistics.fmean(one.reward for one in valid if one.reward is not None)
        stats["reward_std"] = statistics.pstdev(one.reward for one in valid if one.reward is not None)
    for name in sorted({name for one in valid for name in one.record.rewards} - {"reward"}):
        if numbers := usable_of(one.record.rewards.get(name) for one in valid):
            stats[f"reward/{name}"] = statistics.fmean(numbers)
    if own := usable_of(reward for one in valid for reward in one.rewarded.values()):
        stats["call_reward_mean"] = statistics.fmean(own)
    if unknown := sum(one.unknown for one in valid):
        stats["call_rewards_unknown"] = unknown
    return stats


def _harness_stats(rollouts: Sequence[Taken]) -> dict[str, float]:
    rewards = [one.reward for one in rollouts if one.reward is not None]
    means = {"reward_mean": statistics.fmean(rewards), "pass_rate": statistics.fmean(map(passes, rewards))} if rewards else {}
    return {"rollouts": len(rollouts), "valid": len(rewards), **means}


def group_staleness(group: Iterable[Taken], version: int) -> int:
    """`version` minus the version step of the oldest token that training this group would use; 0 where it would use none.

    This is the exact test at consumption: it looks at the tokens, not at when their rollout began.
    """
    return max((version - one.oldest for one in group if one.oldest is not None), default=0)


def staleness(table: pa.Table, version: int) -> tuple[int, float]:
    """(largest, mean) of `version` minus the version step of each token in the loss; (0, 0.0) where there is none."""
    steps = flat(table, "steps")[flat(table, "weight") > 0]
    if not len(steps):
        return 0, 0.0
    lags = version - steps.astype(np.int64)
    return int(lags.max()), float(lags.mean())


def staleness_tokens(table: pa.Table, version: int) -> dict[str, int]:
    """Tokens in the loss by their staleness, as text, in rising order."""
    steps = flat(table, "steps")[flat(table, "weight") > 0]
    ages, counts = np.unique(version - steps.astype(np.int64), return_counts=True)
    return {str(age): int(count) for age, count in zip(ages, counts, strict=True)}


def _check(groups: Sequence[Sequence[Taken]], config: Train) -> None:
    seen: set[str] = set()
    mixed = config.advantage.group_by == "task"
    for group in groups:
        kinds = {(one.record.group, one.record.task_name, "" if mixed else one.record.harness) for one in group}
        if len(kinds) > 1:
            raise BatchError(f"one group holds rollouts of different groups, tasks or harnesses: {sorted(map(str, kinds))}")
        for one in group:
            if one.record.id in seen:
                raise BatchError(f"rollout {one.record.id} stands twice in one step batch")
            seen.add(one.record.id)
