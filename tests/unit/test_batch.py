"""The step batch: group statistics over trajectories, credit per token, shares for ranks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.config import Advantage, Credit, Train
from forge_ray.outcome import Outcome
from forge_ray.trajectories import batch, split
from forge_ray.trajectories.tree_rows import trees
from tests.unit.making import make_call, make_record, make_rollout

CENTRED = Advantage(name="dr_grpo")


def built(*groups: Any, **config: Any) -> batch.StepBatch:
    return batch.build_step(groups, Train(**config))


def advantages(step: batch.StepBatch) -> dict[str, set[float]]:
    """Advantages of the tokens in the loss, by rollout."""
    found: dict[str, set[float]] = {}
    for row in step.table.to_pylist():
        found.setdefault(row["rollout"], set()).update(a for a, w in zip(row["advantage"], row["weight"], strict=True) if w > 0)
    return found


def test_the_baseline_counts_trajectories_not_samples() -> None:
    # A = 1 became three samples, B = 0 one. Over samples the baseline would be 0.75.
    step = built([make_rollout("a.0", 1, samples=3), make_rollout("b.0", 0, samples=1)], advantage=CENTRED)
    assert advantages(step) == {"a.0": {0.5}, "b.0": {-0.5}}
    assert step.table.column("samples").to_pylist() == [3, 3, 3, 1]
    assert step.table.column("sample").to_pylist() == [0, 1, 2, 0]
    assert step.stats["samples_per_rollout"] == 2


def test_one_right_of_four_per_token() -> None:
    step = built([make_rollout(f"{n}.0", reward) for n, reward in enumerate([1, 0, 0, 0])])
    found = advantages(step)
    assert [found[f"{n}.0"].pop() for n in range(4)] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_a_token_gets_discount_kind_weight_and_advantage_of_its_call() -> None:
    calls = [
        make_call([1], [2, 3], order=0, session="a.0"),
        make_call([9], [8], order=1, session="a.0", kind="subagent"),
        make_call([1, 2, 3, 4], [5], order=2, session="a.0"),
        make_call([7], [7], order=3, session="a.0", kind="aux"),
    ]
    other = make_rollout("b.0", 0)
    step = built([(make_record("a.0", 1), calls), other], credit=Credit(gamma=0.5, kind_weights={"subagent": 0.25}), advantage=CENTRED)
    main, sub, _ = step.table.to_pylist()
    assert main["ids"] == [1, 2, 3, 4, 5]
    assert main["advantage"] == [0, 0.125, 0.125, 0, 0.5]
    assert main["weight"] == [0, 1, 1, 0, 1]
    assert main["call"] == [-1, 0, 0, -1, 2]
    assert sub["ids"] == [9, 8] and sub["advantage"] == [0, 0.25] and sub["weight"] == [0, 0.25]
    assert [row["reward"] for row in (main, sub)] == [1, 1]
    assert step.stats["calls"] == 5 and step.stats["calls_trained"] == 4


@pytest.mark.parametrize("rewards", [[1], [1, 1], [1, None], [1, math.nan], [1, 1e308]])
def test_a_degenerate_group_is_kept_with_weight_zero_and_counted(rewards: list[float | None]) -> None:
    step = built([make_rollout(f"{n}.0", reward) for n, reward in enumerate(rewards)], [])
    assert step.stats["groups"] == 2 and step.stats["groups_degenerate"] == 2
    assert step.stats["rollouts_trained"] == step.stats["tokens"] == step.stats["tokens_trained"] == 0
    for row in step.table.to_pylist():
        assert row["advantage"] == row["weight"] == [0] * len(row["ids"])
        assert any(row["mask"]), "the file still tells what was sampled"
    assert step.table.num_rows == sum(reward == 1 for reward in rewards)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome not in ("ok", "truncated")])
def test_an_infrastructure_failure_is_not_a_reward_of_zero(outcome: Outcome) -> None:
    broken = make_rollout("c.0", 0.0, outcome=outcome)
    step = built([make_rollout("a.0", 1), make_rollout("b.0", 0), broken], advantage=CENTRED)
    assert advantages(step) == {"a.0": {0.5}, "b.0": {-0.5}}
    assert step.stats["rollouts_invalid"] == 1 and step.stats["reward_mean"] == 0.5


def test_a_truncated_rollout_counts_with_its_reward() -> None:
    step = built([make_rollout("a.0", 1), make_rollout("b.0", 0, outcome=Outcome.TRUNCATED)], advantage=CENTRED)
    assert advantages(step) == {"a.0": {0.5}, "b.0": {-0.5}}


def test_a_valid_rollout_without_trainable_tokens_still_sets_the_baseline() -> None:
    silent = (make_record("b.0", 0), [make_call([1], [2], session="b.0", masked_by_grammar=True)])
    step = built([make_rollout("a.0", 1), silent], advantage=CENTRED)
    assert advantages(step) == {"a.0": {0.5}}
    assert step.stats["rollouts_untrained"] == 1 and step.stats["rollouts_trained"] == 1


def test_a_group_that_waits_for_its_step_holds_each_token_once() -> None:
    """Also where it was asked before what it would teach alone; its prompts, which were sent again with every call, are let go."""
    calls = [make_call([1, 2], [3], session="a.0")]
    for order in range(1, 40):
        before = calls[-1]
        known = [*before.prompt_ids, *before.ids]
        calls.append(make_call([*known, 4], [5], order=order, session="a.0", parent=before.id, shared=len(known)))
    group = [(make_record("a.0", 1), calls), make_rollout("b.0", 0)]
    taken = batch.take(group, Train(advantage=CENTRED))
    held = sum(len(call.new) + len(call.ids) for one in taken for call in one.trajectory.calls)
    assert held == len(calls[-1].prompt_ids) + 1 + 6 < sum(len(call.prompt_ids) for call in calls) / 10
    first = batch.form([taken], Train(advantage=CENTRED))
    again, whole = batch.form([taken], Train(advantage=CENTRED), version=4), built(group, advantage=CENTRED)
    assert first.table.equals(again.table) and first.table.equals(whole.table) and first.stats == whole.stats


def test_rewards_by_name_are_averaged_over_those_that_have_them() -> None:
    group = [
        make_rollout("a.0", 1, rewards={"reward": 1, "format": 0}),
        make_rollout("b.0", 0, rewards={"reward": 0, "format": 1}),
        make_rollout("c.0", 1),
        make_rollout("d.0", None, rewards={"format": 1}),
        make_rollout("e.0", 1e308, rewards={"format": 1}),
        make_rollout("f.0", 0, rewards={"format": -1e308}),
    ]
    stats = built(group).stats
    assert stats["reward/format"] == 0.5 and "reward/reward" not in stats
    assert stats["reward_mean"] == 0.5 and stats["reward_std"] == 0.5


def test_the_same_rollouts_give_the_same_table_in_whatever_order_the_log_gave_the_calls() -> None:
    record, calls = make_rollout("a.0", 1, samples=4)
    other = make_rollout("b.0", 0)
    assert built([(record, calls), other]).table.equals(built([(record, calls[::-1]), other]).table)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ([make_rollout("a.0", 1), make_rollout("a.0", 0)], "a.0 stands twice"),
        ([make_rollout("a.0", 1, purpose="eval")], "a.0 was made for evaluation"),
        ([(make_record("a.0", 1), [make_call([1], [2], session="a.0", purpose="eval")])], "a.0 was made for evaluation"),
        ([(make_record("a.0", 1), [make_call([1], [2], session="b.0")])], "another session"),
        ([make_rollout("a.0", 1), make_rollout("b.0", 0, harness="codex")], "different groups, tasks or harnesses"),
        ([make_rollout("a.0", 1, group=0), make_rollout("b.0", 0, group=1)], "different groups, tasks or harnesses"),
    ],
)
def test_what_can_never_be_one_batch_is_refused(group: Any, words: str) -> None:
    with pytest.raises(batch.BatchError, match=words):
        built(group)
    with pytest.raises(batch.BatchError, match=r"a\.0 stands twice"):
        built([make_rollout("a.0", 1)], [make_rollout("a.0", 0)])


def test_groups_of_a_task_may_mix_harnesses_where_the_config_says_so() -> None:
    group = [make_rollout("a.0", 1, harness="react"), make_rollout("b.0", 0, harness="codex")]
    with pytest.raises(batch.BatchError, match="different groups, tasks or harnesses"):
        built(group)
    step = built(group, advantage=Advantage(name="dr_grpo", group_by="task"))
    assert advantages(step) == {"a.0": {0.5}, "b.0": {-0.5}}
    with pytest.raises(batch.BatchError, match="different groups, tasks or harnesses"):
        built([group[0], make_rollout("b.0", 0, task_name="other")], advantage=Advantage(group_by="task"))


def test_each_harness_has_its_own_numbers_where_there_are_several() -> None:
    step = built(
        [make_rollout("a.0", 1, harness="react"), make_rollout("b.0", 0, harness="react")],
        [make_rollout("c.0", 0.5, harness="codex", group=1), make_rollout("d.0", None, harness="codex", group=1)],
    )
    assert step.stats["harnesses"] == {
        "codex": {"rollouts": 2, "valid": 1, "reward_mean": 0.5, "pass_rate": 0.0},
        "react": {"rollouts": 2, "valid": 2, "reward_mean": 0.5, "pass_rate": 0.5},
    }
    assert "harnesses" not in built([make_rollout("a.0", 1), make_rollout("b.0", 0)]).stats


def test_the_statistics_of_the_papers_literal_reading() -> None:
    # Three calls of r_T = 1 at gamma 1/2: (1/4 + 1/2 + 1) / 3 = 7/12; one call of r_T = 1/4. Their mean is 5/12.
    group = [make_rollout("a.0", 1, samples=3), make_rollout("b.0", 0.25)]
    step = built(group, credit=Credit(gamma=0.5, statistics="mean_sample_reward"), advantage=CENTRED)
    assert sorted(advantages(step)["a.0"]) == pytest.approx([1 / 24, 1 / 12, 1 / 6], abs=1e-7)
    assert sorted(advantages(step)["b.0"]) == pytest.approx([-1 / 6], abs=1e-7)
    assert step.table.column("reward").to_pylist() == [1, 1, 1, 0.25], "the reward stays what it was"


def test_a_truncated_rollout_can_count_without_being_trained() -> None:
    group = [make_rollout("a.0", 1), make_rollout("b.0", 0, outcome=Outcome.TRUNCATED)]
    step = built(group, credit=Credit(truncated="mask"), advantage=CENTRED)
    assert advantages(step) == {"a.0": {0.5}} and step.stats["rollouts_untrained"] == 1
    step = built([make_rollout("a.0", 1), make_rollout("b.0", 0.5, outcome=Outcome.TRUNCATED)], credit=Credit(truncated="scale"))
    assert step.stats["reward_mean"] == 0.75, "as verified"
    step = built(
        [make_rollout("a.0", 1), make_rollout("b.0", 0.5, outcome=Outcome.TRUNCATED)], credit=Credit(truncated="scale"), advantage=CENTRED
    )
    assert advantages(step) == {"a.0": {0.375}, "b.0": {-0.375}}


def test_a_calls_own_reward_adds_its_advantage_among_the_groups_calls() -> None:
    first = make_rollout("a.0", 1, samples=2, call_rewards={"0": -0.25, "1": 1.0})
    second = make_rollout("b.0", 0, samples=2, call_rewards={"-1": 0.75, "nobody": 9.0})
    # Terminal: +-1/2. Own: mean 1/2, so -3/4, 1/2 and 1/4.
    step = built([first, second], advantage=CENTRED)
    found = [[a for a, w in zip(row["advantage"], row["weight"], strict=True) if w] for row in step.table.to_pylist()]
    assert found == [[-0.25] * 3, [1.0] * 3, [-0.5] * 3, [-0.25] * 3]
    assert step.stats["call_reward_mean"] == 0.5 and step.stats["call_rewards_unknown"] == 1
    assert advantages(built([first, second], advantage=CENTRED, credit=Credit(call_rewards=2.0)))["b.0"] == {-0.5, 0.0}
    assert advantages(built([first, second], advantage=CENTRED, credit=Credit(call_rewards=0.0))) == {"a.0": {0.5}, "b.0": {-0.5}}


def test_where_only_the_calls_rewards_differ_only_their_calls_are_trained() -> None:
    group = [make_rollout("a.0", 1, samples=2, call_rewards={"0": 1.0}), make_rollout("b.0", 1, samples=2, call_rewards={"0": 0.0})]
    step = built(group, advantage=CENTRED)
    assert [sum(row["weight"]) > 0 for row in step.table.to_pylist()] == [True, False, True, False]
    assert advantages(step) == {"a.0": {0.5}, "b.0": {-0.5}} and step.stats["groups_degenerate"] == 0
    assert (step.stats["rollouts_trained"], step.stats["calls_trained"]) == (2, 2)
    same = [make_rollout("a.0", 1, call_rewards={"0": 1.0}), make_rollout("b.0", 1, call_rewards={"0": 1.0})]
    assert built(same).stats["groups_degenerate"] == 1


@pytest.mark.parametrize("span", ["step", "rollout"])
def test_a_step_of_tries_has_the_same_numbers_as_one_of_samples(span: str) -> None:
    groups = [
        [make_rollout("a.0", 1, samples=3), make_rollout("b.0", 0), make_rollout("c.0", None)],
        [make_rollout(f"d{n}.0", 1, group=1, samples=2) for n in range(2)],
    ]
    config = {"advantage": CENTRED, "tree": {"span": span}}
    samples, tries = (batch.build_step(groups, Train(builder=name, **config), version=4) for name in ("chain", "tree"))
    differ = {name for name in samples.stats if samples.stats[name] != tries.stats[name]}
    assert differ == {"samples", "tokens"}
    assert tries.stats["samples"] == (1 if span == "step" else 4)
    # Three calls on one prompt "9 9", each with one more prompt token and three sampled ones, the last of which predicts nothing.
    assert (samples.stats["tokens"], tries.stats["tokens"]) == (24, 11 if span == "step" else 16)
    named = {
        name: (group, harness, reward)
        for row in tries.table.to_pylist()
        for name, group, harness, reward in zip(row["rollouts"], row["groups"], row["harnesses"], row["rewards"], strict=True)
    }
    assert named["a.0"] == (0, "react", 1) and named["d1.0"] == (1, "react", 1)
    (tree, *_) = trees(tries.table)
    assert tree.advantage[tree.owner == tree.rollouts.index("a.0")].tolist() == [0.5] * 9


# --- staleness -----------------------------------------------------------------------------------------------------------------------


def versioned(rollout: str, reward: float | None, *labels: str, **changes: Any) -> Any:
    calls = [make_call([1], [2] * 2, order=n, session=rollout, spans=[(label, 0, 2)], **changes) for n, label in enumerate(labels)]
    return make_record(rollout, reward), calls


def stale(group: Any, version: int, **config: Any) -> int:
    return batch.group_staleness(batch.take(group, Train(**config)), version)


def test_staleness_is_of_the_oldest_token_that_would_be_trained() -> None:
    group = [versioned("a.0", 1, "0.5", "0.7"), versioned("b.0", 0, "0.6")]
    assert stale(group, 7) == 2
    assert stale([*group, versioned("c.0", None, "0.1")], 7) == 2, "an invalid rollout trains nothing"
    assert stale([*group, versioned("c.0", 0, "0.1", delivered=False)], 7) == 2
    assert stale(group, 7, credit=Credit(scope="last")) == 1
    assert stale([], 7) == stale([versioned("c.0", 0)], 7) == 0


def test_a_call_that_lived_through_an_update_is_as_old_as_its_first_token() -> None:
    call = make_call([1], [2, 3, 4], session="a.0", spans=[("0.4", 0, 1), ("0.5", 1, 3)])
    step = batch.build_step([[(make_record("a.0", 1), [call]), versioned("b.0", 0, "0.5")]], Train(), version=5)
    assert stale([(make_record("a.0", 1), [call])], 5) == 1
    assert step.stats["staleness_max"] == 1 and step.stats["staleness_mean"] == pytest.approx(1 / 5)
    assert step.stats["staleness_tokens"] == {"0": 4, "1": 1}


def test_steps_count_on_after_a_resume_and_the_first_weights_are_step_zero() -> None:
    group = [versioned("a.0", 1, "0.12", "1.13"), versioned("b.0", 0, "2.init")]
    assert stale(group[:1], 13) == 1
    assert stale(group, 13) == 13


def test_a_batch_without_a_trained_token_has_no_staleness() -> None:
    assert batch.build_step([], Train(), version=5).stats["staleness_max"] == 0


# --- shares --------------------------------------------------------------------------------------------------------------------------


def test_shares_hold_whole_trajectories_and_balance_what_is_forwarded() -> None:
    long = (make_record("a.0", 1), [make_call([5] * 30, [1] * 10, session="a.0")])
    short = [make_rollout(f"b{n}.0", 0, samples=2) for n in range(4)]
    idle = [make_rollout(f"c{n}.0", 1, group=1, samples=9) for n in range(2)]
    step = built([long, *short], idle)
    left, right = split.split(step.table, 2)
    names = [set(part.column("rollout").to_pylist()) for part in (left, right)]
    assert not names[0] & names[1]
    assert "a.0" in names[0] and {f"b{n}.0" for n in range(4)} == names[1], (
        "40 forwarded tokens against 4 x 12; the degenerate group weighs nothing"
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 1])), max_size=9), st.integers(1, 5))
def test_a_split_holds_every_row_once(rollouts: list[tuple[int, int]], parts: int) -> None:
    table = built([make_rollout(f"r{n}.0", reward, samples=samples) for n, (samples, reward) in enumerate(rollouts)]).table
    shares = split.split(table, parts)
    assert len(shares) == parts and all(share.schema.equals(table.schema, check_metadata=True) for share in shares)
    keys = [(row["rollout"], row["sample"]) for share in shares for row in share.to_pylist()]
    assert Counter(keys) == Counter((row["rollout"], row["sample"]) for row in table.to_pylist())
    owners = [set(share.column("rollout").to_pylist()) for share in shares]
    assert sum(map(len, owners)) == len(set().union(*owners))


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6), st.none() | st.integers(0, 3))
def test_parts_differ_by_no_more_than_the_largest_item(sizes: list[int], parts: int, seed: int | None) -> None:
    shares = split.partition(sizes, parts, seed=seed)
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert split.partition(sizes, parts, seed=seed) == shares


def test_another_seed_is_another_composition() -> None:
    assert len({str(split.partition([1] * 16, 4, seed=seed)) for seed in range(5)}) == 5
