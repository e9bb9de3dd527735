"""Which stored rollouts are trained, in which groups, in which order: decided once, kept in the run, and then followed.

`plan` chooses from the records of one or more stores; the `Plan` goes to `inputs/stored-groups.json` with the chosen records in it, so a
run that goes on trains the same groups with the same rewards, whatever was stored or rescored meanwhile. Which groups a step takes is a
function of the seed (`batches`). Calls are read when their step is formed.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.outcome import Outcome, Treatment, treatment
from forge_ray.report.summary import Offline
from forge_ray.rollout import RolloutRecord, usable
from forge_ray.run_dir import RunDamaged, RunDir, write_atomic
from forge_ray.trajectories import credit
from forge_ray.trajectories.advantage import STEP_WIDE, group_advantage

WHERE = "--from-rollouts"


class Stored(BaseModel):
    """One rollout that is trained."""

    model_config = ConfigDict(extra="forbid")

    source: int
    """Index of its store."""
    id: str
    """Its id there."""
    record: RolloutRecord
    """With the reward that is trained, under the id and the group that it has in this run."""


class Plan(BaseModel):
    """The groups of an offline run."""

    model_config = ConfigDict(extra="forbid")

    sources: list[str]
    groups: list[list[Stored]]
    left_out: dict[str, int]
    """Groups and rollouts that are not trained, by reason."""

    @property
    def rollouts(self) -> int:
        return sum(len(group) for group in self.groups)


def file(run: RunDir) -> Path:
    """Where a run keeps its plan."""
    return run.inputs / "stored-groups.json"


def keep(run: RunDir, found: Plan) -> None:
    """Store the plan, before anything is trained."""
    write_atomic(file(run), found.model_dump_json() + "\n")


def kept(run: RunDir) -> Plan:
    """The plan of a run that goes on. Raises `RunDamaged`."""
    try:
        return Plan.model_validate_json(file(run).read_bytes())
    except (OSError, ValueError) as error:
        problem = " ".join(str(error).split())[:200]
        raise RunDamaged(f"{file(run)} cannot be read ({problem}): start a new run") from None


def plan(config: Config, sources: Sequence[tuple[str, Sequence[RolloutRecord]]]) -> Plan:
    """The groups that `config` makes of the `sources` (name, training records). Raises `UserError` where they fill no step."""
    assert config.train.offline is not None
    left_out: Counter[str] = Counter()
    names = _distinct([name for name, _ in sources])
    every = [
        Stored(source=index, id=record.id, record=record.model_copy(update={"id": f"{name}/{record.id}"} if len(sources) > 1 else {}))
        for index, (name, (_, records)) in enumerate(zip(names, sources, strict=True))
        for record in records
    ]
    by_slot = _of_slots(every, config, left_out)
    groups = _recorded(by_slot, config) if config.train.offline.groups == "recorded" else _regrouped(by_slot, config, left_out)
    least = 1 if config.train.advantage.name in STEP_WIDE else 2
    chosen: list[list[Stored]] = []
    for group in groups:
        if len(group) < least:
            left_out["groups with a single rollout that may be trained"] += 1
        elif config.train.dynamic_sampling and _silent(group, config):
            left_out["groups whose rewards are all equal (train.dynamic_sampling)"] += 1
        else:
            index = len(chosen)
            chosen.append([_moved(stored, index) for stored in group])
    if len(chosen) < config.train.groups_per_step:
        why = f" ({'; '.join(f'{number} {reason}' for reason, number in left_out.items())})" if left_out else ""
        raise UserError(
            f"{len(chosen)} groups of stored rollouts can be trained, and a step takes {config.train.groups_per_step}{why}",
            where=WHERE,
            fix="lower train.groups_per_step, or add runs",
        )
    return Plan(sources=names, groups=chosen, left_out=dict(left_out))


def steps(found: Plan, config: Config) -> int:
    """Steps that the run has: `train.steps`, or those of `train.offline.epochs` where they are fewer."""
    assert config.train.offline is not None
    if (epochs := config.train.offline.epochs) is None:
        return config.train.steps
    return min(config.train.steps, -(-epochs * len(found.groups) // config.train.groups_per_step))


def trained(found: Plan, config: Config, done: int) -> Offline:
    """What the first `done` steps trained."""
    taken = set(itertools.chain(*itertools.islice(batches(len(found.groups), config.train.groups_per_step, config.seed), done)))
    return Offline(rollouts=sum(len(found.groups[index]) for index in taken), groups=len(taken), sources=found.sources)


def batches(groups: int, size: int, seed: int) -> Iterator[list[int]]:
    """Which of so many groups each step takes, `size` of them (at most `groups`), without end.

    Every epoch has each group once, in an order of its own. A step that an epoch ends in takes the rest of it and goes on with the next
    one; what it has already is put off to the step after it.
    """
    queue: list[int] = []
    epoch = 0
    while True:
        batch: list[int] = []
        while len(batch) < size:
            if not queue:
                queue = list(range(groups))
                random.Random(f"stored groups {seed}/{epoch}").shuffle(queue)
                epoch += 1
            batch.append(queue.pop(next(place for place, group in enumerate(queue) if group not in batch)))
        yield batch


def _silent(group: Sequence[Stored], config: Config) -> bool:
    """Whether a step would learn nothing of the group: no reward differs, of a rollout or of a call, and no teacher speaks."""
    records, rules = [stored.record for stored in group], config.train.credit
    rewards = [credit.scaled(record.reward or 0.0, rules, truncated=record.outcome is Outcome.TRUNCATED) for record in records]
    calls = [number for record in records for number in record.call_rewards.values()] if rules.call_rewards > 0 else []
    return config.train.loss.distillation is None and group_advantage(rewards).degenerate and group_advantage(calls).degenerate


def _of_slots(every: Iterable[Stored], config: Config, left_out: Counter[str]) -> dict[tuple[int, int], list[Stored]]:
    """(source, recorded group) → the rollouts that are trained, one per slot: the first attempt whose outcome is."""
    rollouts = config.rollouts
    found: dict[tuple[int, int], dict[str, Stored]] = {}
    dropped: set[tuple[int, int]] = set()
    for stored in sorted(every, key=lambda stored: (stored.source, stored.record.key, stored.record.attempt)):
        record = stored.record
        if record.group is None:
            continue
        group = found.setdefault((stored.source, record.group), {})
        todo = treatment(record.outcome, rollouts.preset, rollouts.on_outcome)
        if todo is Treatment.DROP_GROUP:
            dropped.add((stored.source, record.group))
        elif todo is not Treatment.TRAIN or not usable(record.reward):
            left_out[f"rollouts that ended {record.outcome}"] += 1
        else:
            group.setdefault(record.key, stored)
    if dropped:
        left_out["groups that are dropped by rollouts.on_outcome"] += len(dropped)
    return {key: list(group.values()) for key, group in sorted(found.items()) if group and key not in dropped}


def _recorded(by_slot: Mapping[tuple[int, int], list[Stored]], config: Config) -> list[list[Stored]]:
    for group in by_slot.values():
        names = sorted({stored.record.harness for stored in group})
        if len(names) > 1 and config.train.advantage.group_by != "task":
            raise UserError(
                f"the recorded groups mix harnesses ({', '.join(names)})",
                where="train.advantage.group_by",
                fix="set it to task, as it was then, or make new groups with train.offline.groups: task_harness",
            )
    return list(by_slot.values())


def _regrouped(by_slot: Mapping[tuple[int, int], list[Stored]], config: Config, left_out: Counter[str]) -> list[list[Stored]]:
    pairs: dict[tuple[str, str], list[Stored]] = {}
    for group in by_slot.values():
        for stored in group:
            harness = "" if config.train.advantage.group_by == "task" else stored.record.harness
            pairs.setdefault((stored.record.task_name, harness), []).append(stored)
    groups: list[list[Stored]] = []
    size = config.train.group_size
    for pair, some in sorted(pairs.items()):
        random.Random(f"regroup {config.seed}/{pair}").shuffle(some)
        whole = [some[first : first + size] for first in range(0, len(some), size)]
        if len(whole) > 1 and len(whole[-1]) < size:
            left_out["rollouts left over when groups were made"] += len(whole.pop())
        groups += whole
    return groups


def _moved(stored: Stored, index: int) -> Stored:
    return stored.model_copy(update={"record": stored.record.model_copy(update={"group": index})})


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that occur twice."""
    found: list[str] = []
    for name in names:
        others = (f"{name}-{number}" for number in itertools.count(2))
        found.append(name if name not in found else next(other for other in others if other not in (*found, *names)))
    return found
