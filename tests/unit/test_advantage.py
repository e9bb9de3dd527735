"""Group advantage against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.trajectories.advantage import ESTIMATORS, group_advantage, group_advantages

NAN = math.nan


def test_one_right_of_four() -> None:
    # mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, std 1/2
    result = group_advantage([1, 0, 0, 0], epsilon=0)
    assert result.advantages == [1.5, -0.5, -0.5, -0.5]
    assert (result.mean, result.std, result.trained, result.degenerate) == (0.25, 0.5, [True] * 4, False)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    assert group_advantage([1, 0, 0, 0], epsilon=0.5).advantages == [0.75, -0.25, -0.25, -0.25]
    assert group_advantage([1, 0, 0, 0]).advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_without_the_standard_deviation() -> None:
    assert group_advantage([3, 1, 2], "dr_grpo").advantages == [1, -1, 0]


@pytest.mark.parametrize(
    "rewards",
    [[1], [1, 1], [], [1, NAN], [NAN, NAN], [0, 0, 0], [1, None], [None], [1, math.inf], [0.1 + 0.2, 0.3], [1, 1e308], [1e308] * 4],
)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_that_says_nothing_is_masked_zeros(rewards: list[float | None], name: str) -> None:
    result = group_advantage(rewards, name)
    assert result.advantages == [0.0] * len(rewards)
    assert result.trained == [False] * len(rewards)
    assert result.degenerate
    assert not any(math.isnan(value) for value in (result.mean or 0, result.std or 0))


def test_an_invalid_reward_is_left_out_of_the_statistics_not_counted_as_zero() -> None:
    result = group_advantage([1, None, 0, NAN], epsilon=0)
    root = math.sqrt(0.5)
    assert result.mean == 0.5 and result.std == pytest.approx(root)
    assert result.advantages == pytest.approx([0.5 / root, 0, -0.5 / root, 0])
    assert result.trained == [True, False, True, False]
    assert group_advantage([1, -1e308, 0, 1e13], epsilon=0) == result


def test_the_largest_rewards_that_a_verifier_may_give() -> None:
    result = group_advantage([1e12, -1e12, 0], epsilon=0)
    assert result.advantages == [1, -1, 0] and result.std == 1e12
    small = group_advantage([1e12, 1e12 - 1e6, 1e12], epsilon=0)
    assert small.advantages == pytest.approx([1 / math.sqrt(3), -2 / math.sqrt(3), 1 / math.sqrt(3)])


def test_a_reward_on_the_mean_is_trained_with_advantage_zero() -> None:
    result = group_advantage([0, 1, 2], epsilon=0)
    assert result.advantages == [-1, 0, 1] and result.trained == [True, True, True]


finite = st.floats(-100, 100)


@given(st.lists(finite | st.none() | st.just(NAN), max_size=12), st.sampled_from(sorted(ESTIMATORS)))
def test_advantages_are_finite_and_centred_for_any_group(rewards: list[float | None], name: str) -> None:
    result = group_advantage(rewards, name)
    assert len(result.advantages) == len(result.trained) == len(rewards)
    assert all(math.isfinite(value) for value in result.advantages)
    assert math.fsum(result.advantages) == pytest.approx(0, abs=1e-4)
    assert all(ok or value == 0 for ok, value in zip(result.trained, result.advantages, strict=True))


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=10), st.floats(0.5, 20), finite)
def test_scale_and_shift_of_the_rewards_do_not_matter(rewards: list[int], scale: float, shift: float) -> None:
    plain = group_advantage(rewards, epsilon=0)
    moved = group_advantage([scale * reward + shift for reward in rewards], epsilon=0)
    assert moved.trained == plain.trained
    assert moved.advantages == pytest.approx(plain.advantages, abs=1e-6)


def test_rloo_is_against_the_mean_of_the_others() -> None:
    # 3 - (1 + 2)/2, 1 - (3 + 2)/2, 2 - (3 + 1)/2
    assert group_advantage([3, 1, 2], "rloo").advantages == [1.5, -1.5, 0]


def test_reinforce_pp_is_against_the_step() -> None:
    # Step [1, 1, 0, 0]: mean 1/2, std sqrt(1/3). The first group alone says nothing, beside the second it does.
    up = 0.5 / math.sqrt(1 / 3)
    first, second = group_advantages([[1, 1, None], [0, 0]], "reinforce_pp", epsilon=0)
    assert first.advantages == pytest.approx([up, up, 0]) and first.trained == [True, True, False]
    assert second.advantages == pytest.approx([-up, -up]) and not second.degenerate
    assert all(one.degenerate for one in group_advantages([[1, 1], [1]], "reinforce_pp"))


def test_reinforce_pp_baseline_is_centred_on_the_group_and_scaled_by_the_step() -> None:
    # Centred [1, -1], [2, -2], and a group that says nothing: squares 1 + 1 + 4 + 4 over 3.
    std = math.sqrt(10 / 3)
    first, second, silent = group_advantages([[3, 1], [0, -4], [5, 5]], "reinforce_pp_baseline", epsilon=0)
    assert first.advantages == pytest.approx([1 / std, -1 / std])
    assert second.advantages == pytest.approx([2 / std, -2 / std])
    assert silent.degenerate and silent.advantages == [0, 0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_groups_do_not_see_one_another(name: str) -> None:
    groups = [[1, 0, 0], [5, None, 9], [2, 2], []]
    assert group_advantages(groups, name) == [group_advantage(group, name) for group in groups]
