"""Credit (Eq. 1) and which calls are trained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.config import Credit
from forge_ray.trajectories import credit
from forge_ray.trajectories.credit import CallCredit
from tests.unit.making import make_call

SCOPES = ["all", "outermost", "last"]


def calls_of(*kinds: str, **changes: Any) -> list[Any]:
    return [make_call([1], [2], order=order, kind=kind, **changes) for order, kind in enumerate(kinds)]


def test_each_call_gets_the_terminal_reward_discounted_by_the_calls_after_it() -> None:
    assert credit.rewards(calls_of("agent", "agent", "agent"), 8.0, Credit(gamma=0.5)) == {0: 2.0, 1: 4.0, 2: 8.0}
    assert credit.rewards(calls_of("agent", "subagent", "agent"), 0.5) == {0: 0.5, 1: 0.5, 2: 0.5}
    assert credit.rewards([], 1.0) == {}


def test_weights_by_kind_and_their_defaults() -> None:
    calls = calls_of("agent", "subagent", "compaction", "aux", "never heard of")
    assert credit.assign(calls) == {n: CallCredit(1.0, 1.0) for n in (0, 1, 2, 4)}
    assert credit.assign(calls, Credit(kind_weights={"subagent": 0.25, "aux": 0.5, "compaction": 0.0})) == {
        0: CallCredit(1.0, 1.0),
        1: CallCredit(1.0, 0.25),
        3: CallCredit(1.0, 0.5),
        4: CallCredit(1.0, 1.0),
    }


def test_a_title_request_that_ends_last_does_not_discount_the_answer() -> None:
    assert credit.assign(calls_of("agent", "agent", "aux"), Credit(gamma=0.5)) == {0: CallCredit(0.5, 1.0), 1: CallCredit(1.0, 1.0)}


@pytest.mark.parametrize(
    "changes", [{"superseded_by": "x"}, {"delivered": False}, {"status": "cancelled"}, {"status": "failed"}, {"status": "open"}]
)
def test_a_reply_that_the_harness_never_had_is_not_a_step(changes: dict[str, Any]) -> None:
    calls = calls_of("agent", "agent", "agent")
    calls[1] = make_call([1], [2], order=1, **changes)
    assert credit.assign(calls, Credit(gamma=0.5)) == {0: CallCredit(0.5, 1.0), 2: CallCredit(1.0, 1.0)}


def test_a_step_that_may_not_be_trained_keeps_its_place() -> None:
    calls = calls_of("agent", "agent", "agent")
    calls[1] = make_call([1], [2], order=1, masked_by_grammar=True)
    assert credit.assign(calls, Credit(gamma=0.5)) == {0: CallCredit(0.25, 1.0), 2: CallCredit(1.0, 1.0)}


def test_scopes() -> None:
    calls = calls_of("agent", "subagent", "agent", "compaction", "subagent")
    assert set(credit.assign(calls, Credit(scope="all"))) == {0, 1, 2, 3, 4}
    assert set(credit.assign(calls, Credit(scope="outermost"))) == {0, 2}
    assert set(credit.assign(calls, Credit(scope="last"))) == {4}
    assert set(credit.assign(calls, Credit(scope="last", kind_weights={"subagent": 0}))) == {3}
    assert credit.assign(calls, Credit(scope="outermost", gamma=0.5)) == {0: CallCredit(0.0625, 1.0), 2: CallCredit(0.25, 1.0)}, (
        "masked, not renumbered"
    )
    calls[4] = make_call([1], [2], order=4, kind="subagent", masked_by_grammar=True)
    assert credit.assign(calls, Credit(scope="last")) == {}, "the last call was no free choice: nothing to train, not another call instead"
    assert credit.assign([], Credit(scope="last")) == {}


@given(st.permutations(range(6)))
def test_the_order_of_completion_does_not_depend_on_the_order_given(order: list[int]) -> None:
    calls = [make_call([1], [2], order=n) for n in range(4)]
    calls += [make_call([1], [2], order=3, id="g00000-0.0/tie"), make_call([1], [2], order=9, ended=None, status="open")]
    ids = ["g00000-0.0/000", "g00000-0.0/001", "g00000-0.0/002", "g00000-0.0/003", "g00000-0.0/tie", "g00000-0.0/009"]
    assert [call.id for call in credit.by_completion([calls[n] for n in order])] == ids


# --- one number per rollout ----------------------------------------------------------------------------------------------------------

MEAN = Credit(statistics="mean_sample_reward", gamma=0.5)


def test_the_papers_literal_reading_is_the_mean_of_the_samples_rewards() -> None:
    calls = calls_of("agent", "subagent", "agent", "aux")
    # Eq. 1 gives 2, 4, 8; the title request is no sample.
    assert credit.trajectory_reward(calls, 8.0, MEAN) == pytest.approx(14 / 3)
    assert credit.trajectory_reward(calls, 8.0, MEAN.model_copy(update={"scope": "outermost"})) == 5.0
    assert credit.trajectory_reward(calls, 8.0, MEAN.model_copy(update={"scope": "last"})) == 8.0
    assert credit.trajectory_reward([], 8.0, MEAN) == 8.0, "no sample: the terminal reward"
    assert credit.trajectory_reward(calls, 8.0, Credit(gamma=0.5)) == 8.0


@given(st.lists(st.sampled_from(["agent", "subagent", "compaction", "aux"]), max_size=8), st.floats(-10, 10), st.sampled_from(SCOPES))
def test_without_a_discount_both_readings_are_the_same(kinds: list[str], reward: float, scope: Any) -> None:
    calls = calls_of(*kinds)
    literal = credit.trajectory_reward(calls, reward, Credit(statistics="mean_sample_reward", scope=scope))
    assert literal == pytest.approx(credit.trajectory_reward(calls, reward, Credit(scope=scope)))


# --- truncated rollouts --------------------------------------------------------------------------------------------------------------


def test_a_truncated_rollout_by_each_policy() -> None:
    calls = [*calls_of("agent", "agent"), make_call([1], [2], order=2, status="length")]

    def of(**config: Any) -> tuple[set[int], float]:
        chosen = Credit(**config)
        return set(credit.assign(calls, chosen, truncated=True)), credit.trajectory_reward(calls, 0.8, chosen, truncated=True)

    assert of() == of(truncated="reward") == ({0, 1, 2}, 0.8)
    assert of(truncated="scale") == ({0, 1, 2}, 0.4)
    assert of(truncated="scale", truncated_scale=0.0) == ({0, 1, 2}, 0.0)
    assert of(truncated="mask") == (set(), 0.8), "in the statistics, out of the loss"
    assert of(truncated="mask", statistics="mean_sample_reward") == (set(), pytest.approx(0.8))
    for policy in ("mask", "finished_calls"):
        number = of(truncated=policy, statistics="mean_sample_reward", gamma=0.5)[1]
        assert number == pytest.approx(0.8 * (0.25 + 0.5 + 1) / 3), "what is left out of the loss is not left out of the mean"
    assert of(truncated="finished_calls") == ({0, 1}, 0.8), "the reply that was cut is left out"
    assert set(credit.assign(calls, Credit(truncated="finished_calls"))) == {0, 1, 2}, "a rollout that ended well is not touched"
    assert credit.assign(calls, Credit(gamma=0.5, truncated="finished_calls"), truncated=True)[1] == CallCredit(0.5, 1.0), (
        "it keeps its place"
    )


# --- rewards of single calls ---------------------------------------------------------------------------------------------------------


def test_rewards_of_calls_by_id_and_by_place_among_the_counted_calls() -> None:
    calls = calls_of("agent", "aux", "agent", "agent")
    first, last = calls[0].id, calls[3].id
    assert credit.by_ordinal(calls, {first: -0.25, last: 1.0}) == ({0: -0.25, 3: 1.0}, []), "both arrive at their call (m24)"
    assert credit.by_ordinal(calls, {"1": 2.0, "-1": 3.0, "-3": 1.0}) == ({2: 2.0, 3: 3.0, 0: 1.0}, [])
    assert credit.by_ordinal(calls, {last: 1.0, "-1": 0.5}) == ({3: 1.5}, []), "two names of one call add up"
    assert credit.by_ordinal(calls, {"3": 1.0, calls[1].id: 1.0, "x": 1.0}) == ({}, ["3", calls[1].id, "x"]), "aux is not counted"
    assert credit.by_ordinal([], {"0": 1.0}) == ({}, ["0"])
