"""The scheduler: groups whole, every slot ends once, nothing lost over a restart."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.failures import simulate
from forge_ray.config import Advantage, Config, Train
from forge_ray.job.flow import Flow
from forge_ray.job.scheduler import Group, Scheduler, TaskRef, pair
from forge_ray.outcome import RATED, Outcome
from forge_ray.rollout import RolloutRecord, RolloutRequest

FAIL_FAIL_OK = (Outcome.ENGINE, Outcome.ENGINE, Outcome.OK)
TASKS = [TaskRef(f"t{i}", f"/tasks/t{i}") for i in range(5)]


def config(**rollouts: object) -> Config:
    return Config.model_validate(
        {
            "name": "x", "seed": 3, "policy": {"model": "m"}, "harnesses": [{"name": "a"}, {"name": "b"}],
            "tasks": {"train": "t", "heldout": "h"}, "train": {"group_size": 3, "groups_per_step": 2}, "rollouts": rollouts,
        }
    )  # fmt: skip


def record(request: RolloutRequest, outcome: Outcome = Outcome.OK, reward: float = 1.0) -> RolloutRecord:
    rated = outcome in RATED
    return RolloutRecord(
        id=f"{request.key}.{request.attempt}", key=request.key, purpose="train", task=request.task, task_name=request.task_name,
        harness=request.harness, group=request.group, attempt=request.attempt, outcome=outcome, detail="", reward=reward if rated else None,
    )  # fmt: skip


def test_each_epoch_visits_every_pair_of_task_and_harness_once_in_an_order_of_its_own() -> None:
    epochs = [[pair(i + 10 * e, TASKS, ["a", "b"], 3) for i in range(10)] for e in range(2)]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert pair(7, TASKS, ["a", "b"], 3) == pair(7, TASKS, ["a", "b"], 3)


def test_the_slots_of_a_group_of_one_task_go_round_over_the_harnesses() -> None:
    mixed = config()
    train = mixed.train.model_copy(update={"advantage": Advantage(group_by="task")})
    mixed = mixed.model_copy(update={"train": train})
    scheduler = Scheduler(mixed, TASKS)
    for _ in range(5):
        scheduler.admit_group()
    asked = scheduler.launchable(99)
    assert len({request.task_name for request in asked}) == 5, "an epoch is each task once"
    by_group = {index: [request.harness for request in asked if request.group == index] for index in range(5)}
    assert by_group[0] == ["a", "b", "a"] and by_group[1] == ["b", "a", "b"]
    assert len({request.task_name for request in asked if request.group == 2}) == 1
    # A run that goes on with its harnesses in another order tries a slot again with the slot's own.
    again = Scheduler(mixed.model_copy(update={"harnesses": mixed.harnesses[::-1]}), TASKS)
    again.restore([record(asked[0]), record(asked[1], Outcome.ENGINE)], [])
    assert [(request.key, request.attempt, request.harness) for request in again.launchable(9)] == [
        (asked[1].key, 1, "b"),
        (asked[2].key, 0, "b"),
    ]


def test_an_infrastructure_error_is_tried_again_and_then_dropped_without_a_reward() -> None:
    scheduler = Scheduler(config(retries=1), TASKS)
    scheduler.admit_group()
    first, second, third = scheduler.launchable(10)
    scheduler.finish(record(first, Outcome.ENGINE))
    (again,) = scheduler.launchable(10)
    assert (again.key, again.attempt) == (first.key, 1)
    scheduler.finish(record(second))
    scheduler.finish(record(third, reward=0.0))
    assert scheduler.ready() == [] and scheduler.running == 1
    scheduler.finish(record(again, Outcome.ENGINE))
    (group,) = scheduler.ready()
    assert [r.key for r in group.records] == [second.key, third.key]
    assert (scheduler.accepted, scheduler.running) == (3, 0), "a dropped slot counts for the admission: a step takes groups"


def test_a_broken_task_drops_its_group_and_frees_its_room() -> None:
    scheduler = Scheduler(config(), TASKS)
    scheduler.admit_group()
    for request, outcome in zip(scheduler.launchable(10), (Outcome.OK, Outcome.TASK, Outcome.OK), strict=True):
        scheduler.finish(record(request, outcome))
    assert scheduler.ready() == []
    assert (scheduler.empty_groups, scheduler.accepted, scheduler.running, scheduler.claimed) == (1, 0, 0, 0)


def test_the_paper_preset_drops_a_truncated_rollout() -> None:
    scheduler = Scheduler(config(preset="paper"), TASKS)
    scheduler.admit_group()
    for request, outcome in zip(scheduler.launchable(10), (Outcome.OK, Outcome.TRUNCATED, Outcome.OK), strict=True):
        scheduler.finish(record(request, outcome))
    (group,) = scheduler.ready()
    assert len(group.records) == 2 and scheduler.running == 0 and scheduler.treated == {"train": 2, "drop": 1}


@pytest.mark.parametrize(("estimator", "ready"), [("grpo", 0), ("reinforce_pp", 1)])
def test_a_group_that_shrank_to_one_has_no_baseline_and_is_replaced(estimator: str, ready: int) -> None:
    shrinking = config(on_outcome={"engine": "drop"})
    shrinking = shrinking.model_copy(update={"train": Train(group_size=3, advantage=Advantage.model_validate({"name": estimator}))})
    scheduler = Scheduler(shrinking, TASKS)
    scheduler.admit_group()
    records = [record(request, outcome) for request, outcome in zip(scheduler.launchable(10), FAIL_FAIL_OK, strict=True)]
    for ended in records:
        scheduler.finish(ended)
    again = Scheduler(shrinking, TASKS)
    again.restore(records, [])
    for one in (scheduler, again):
        assert len(one.ready()) == ready and one.empty_groups == 1 - ready == one.unused
        assert one.accepted == 3 * ready and one.claimed == ready, "its room is free again"
    assert scheduler.treated == {"drop": 2, "train": 1}


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome not in RATED])
@pytest.mark.parametrize(
    ("policy", "trained", "treated"),
    [
        ("retry", [2], {"train": 2, "retry": 1, "drop": 1}),
        ("drop", [2], {"train": 2, "drop": 1}),
        ("drop_group", [], {"train": 2, "drop_group": 1}),
    ],
)
def test_each_kind_of_failure_under_each_policy_and_never_a_reward_of_zero(
    outcome: Outcome, policy: str, trained: list[int], treated: dict[str, int]
) -> None:
    scheduler = Scheduler(config(retries=1, on_outcome={str(outcome): policy}), TASKS)
    scheduler.admit_group()
    while waiting := scheduler.launchable(10):
        for request in waiting:
            scheduler.finish(record(request, outcome if request.key.endswith("-1") else Outcome.OK))
    assert [len(group.records) for group in scheduler.ready()] == trained and scheduler.treated == treated
    assert all(r.reward == 1.0 for group in scheduler.ready() for r in group.records)
    assert (scheduler.empty_groups, scheduler.unused) == ((0, 0) if trained else (1, 2))


def test_treatments_are_counted_as_what_became_of_each_rollout() -> None:
    scheduler = Scheduler(config(retries=1, on_outcome={"task": "drop_group", "truncated": "train"}), TASKS)
    scheduler.admit_group()
    first, second, third = scheduler.launchable(10)
    scheduler.finish(record(first, Outcome.ENGINE))
    scheduler.finish(record(second, Outcome.TRUNCATED))
    (again,) = scheduler.launchable(10)
    scheduler.finish(record(again, Outcome.ENGINE))
    scheduler.finish(record(third, Outcome.TASK))
    assert scheduler.treated == {"retry": 1, "drop": 1, "train": 1, "drop_group": 1}
    assert (scheduler.empty_groups, scheduler.unused) == (1, 1), "the truncated one was fit to be trained"


def test_dynamic_sampling_replaces_groups_that_say_nothing_up_to_its_bound_and_admission_makes_room() -> None:
    settings = config(max_in_flight=100)
    settings = settings.model_copy(update={"train": Train(group_size=3, groups_per_step=2, dynamic_sampling=True, max_resampled_groups=2)})
    flow, stored = Flow(settings, TASKS), []

    def run(reward: float) -> None:
        for request in flow.launch(0):
            stored.append(record(request, reward=reward + (int(request.key[-1]) if reward else 0)))
            flow.finish(stored[-1])

    def silent(group: Group) -> bool:
        return len({r.reward for r in group.records}) == 1

    run(0.0)
    assert len(flow.scheduler.ready()) == 4, "the bound of staleness 1 lets two steps' groups in"
    kept, gone = flow.sift(flow.scheduler.ready(), silent)
    assert (len(kept), [group.index for group in gone], flow.resampled) == (2, [0, 1], [0, 1])
    assert flow.sift(kept, silent) == (kept, []), "the step has had its two"
    restored = Flow(settings, TASKS)
    restored.scheduler.restore(stored, [], flow.resampled)
    for one in (flow, restored):
        assert (one.scheduler.resampled_groups, one.scheduler.accepted, one.scheduler.claimed, one.scheduler.unused) == (2, 6, 2, 6)
        assert len(one.scheduler.ready()) == 2
    run(1.0)
    taken = flow.take(0, flow.scheduler.ready(), lambda _: 0)
    flow.used(taken.batch)
    assert len(taken.batch) == 2 and flow.resampled == [] and flow.scheduler.treated == {}
    assert [group.index for group in flow.scheduler.ready()] == [4, 5], "two were admitted in the place of those that were replaced"


def test_without_dynamic_sampling_no_group_is_replaced() -> None:
    flow = Flow(config(), TASKS)
    for request in flow.launch(0):
        flow.finish(record(request))
    assert flow.sift(flow.scheduler.ready(), lambda _: True) == (flow.scheduler.ready(), [])


def test_what_failure_policies_cost_on_the_seeded_simulation() -> None:
    spent = {policy: simulate(policy, attempts=10_000, failures=0.05, group=8) for policy in ("retry", "shrink", "drop_group")}
    assert all(one.started >= 10_000 for one in spent.values())
    assert spent["retry"].untrained <= 0.06 and spent["shrink"].untrained <= 0.06
    assert abs(spent["drop_group"].untrained - (1 - 0.95**8)) < 0.02
    assert spent["retry"].short < 10 and 0.25 < spent["shrink"].short / spent["shrink"].groups < 0.4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_batches_count_every_rollout_once_at_whatever_moments_the_driver_starts_again(seed: int) -> None:
    draw, stored, batches, flying = random.Random(seed), [], [], []
    flow = Flow(config(retries=1), TASKS)
    for _ in range(150):
        ready = flow.scheduler.ready()
        if draw.random() < 0.05:
            flow, flying = Flow(config(retries=1), TASKS), []
            flow.restore(draw.sample(stored, len(stored)), json.loads(json.dumps(batches)))
        elif len(ready) >= 2:
            taken = [group.index for group in ready[:2]]
            batches.append({"outcomes": flow.outcomes, "treatments": flow.scheduler.treated, "taken": taken})
            flow.used(ready[:2])
        else:
            flying += flow.launch(len(batches))
            request = flying.pop(draw.randrange(len(flying)))
            stored.append(record(request, draw.choice([Outcome.OK, Outcome.OK, Outcome.TRUNCATED, Outcome.SANDBOX, Outcome.TASK])))
            flow.finish(stored[-1])
    told = [*batches, {"outcomes": flow.outcomes, "treatments": flow.scheduler.treated}]
    assert sum((Counter(one["outcomes"]) for one in told), Counter()) == Counter(one.outcome for one in stored)
    treated = sum((Counter(one["treatments"]) for one in told), Counter())
    fit = sum(one.outcome in RATED for one in stored)
    assert sum(treated.values()) == len(stored) and treated["train"] == fit
    assert treated["drop_group"] == sum(one.outcome is Outcome.TASK for one in stored)


def test_a_trained_outcome_without_a_reward_is_refused() -> None:
    scheduler = Scheduler(config(), TASKS)
    scheduler.admit_group()
    broken = record(scheduler.launchable(1)[0]).model_copy(update={"reward": None})
    with pytest.raises(ValueError, match="without a reward"):
        scheduler.finish(broken)


def test_a_group_that_has_begun_keeps_the_task_and_harness_of_its_records() -> None:
    scheduler = Scheduler(config(), TASKS)
    scheduler.admit_group()
    first, second, _ = scheduler.launchable(10)
    done = record(first)
    for tasks in (TASKS[::-1], [TaskRef("other", "/tasks/other")], [TaskRef(t.name, f"/moved/{t.name}") for t in TASKS]):
        again = Scheduler(config(), tasks)
        again.restore([done], [])
        left = again.launchable(10)
        here = {t.name: t.path for t in tasks}
        assert {(r.task_name, r.task, r.harness) for r in left} == {(first.task_name, here.get(first.task_name, first.task), first.harness)}
        assert [r.key for r in left] == [second.key, f"g{0:05d}-2"]


def test_a_group_with_more_rollouts_than_a_group_has_is_complete() -> None:
    four = [
        record(RolloutRequest(key=f"g00000-{i}", purpose="train", task="/tasks/t0", task_name="t0", harness="a", group=0)) for i in range(4)
    ]
    scheduler = Scheduler(config(), TASKS)
    scheduler.restore(four, [])
    assert len(scheduler.ready()) == 1 and scheduler.running == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_restart_at_any_moment_loses_no_rollout_and_uses_none_twice(seed: int, groups_wanted: int) -> None:
    draw = random.Random(seed)
    stored: list[RolloutRecord] = []
    trained: dict[int, list[str]] = {}
    scheduler = Scheduler(config(), TASKS)
    for _ in range(1000):
        if len(trained) >= groups_wanted:
            break
        action = draw.random()
        if action < 0.05:
            scheduler = Scheduler(config(), TASKS)
            scheduler.restore(draw.sample(stored, len(stored)), trained)
        elif action < 0.2 and scheduler.running < 9:
            scheduler.admit_group()
        elif scheduler.waiting:
            launched = scheduler.launchable(draw.randint(1, 4))
            for request in launched:
                done = record(request, draw.choice([Outcome.OK, Outcome.OK, Outcome.TRUNCATED, Outcome.SANDBOX]), draw.choice([0.0, 1.0]))
                stored.append(done)
                scheduler.finish(done)
        elif (ready := scheduler.ready()) and draw.random() < 0.5:
            scheduler.take(ready[:1])
            trained[ready[0].index] = [r.id for r in ready[0].records]
    used = [name for names in trained.values() for name in names]
    assert len(used) == len(set(used))
    assert len({(r.key, r.attempt) for r in stored}) == len(stored), "a rollout was asked for again although its record was stored"
    again = Scheduler(config(), TASKS)
    again.restore(stored, trained)
    kept = {r.id for group in again.ready() for r in group.records} | {
        r.id for group in again._open.values() for r in group.accepted.values()
    }
    good = {r.id for r in stored if r.outcome in RATED and r.group not in trained}
    assert kept <= good and len(kept) + again.unused == len(good), "all but those of groups that shrank to one"
