"""Learning rates by hand."""

from __future__ import annotations

import pytest

from forge_ray.config import Optimizer, Sft, Source
from forge_ray.train_loop.schedule import policy_rate, sft_rate


def sft(**changes: float) -> Sft:
    return Sft.model_validate(
        {"demonstrations": Source(path="d"), "steps": 10, "lr": 1.0, "warmup_steps": 4, "decay_fraction": 0.5, **changes}
    )


def test_the_policy_rate_is_linear_and_reaches_its_end_at_the_last_step() -> None:
    config = Optimizer(lr=4e-4, lr_end=4e-5)
    assert [policy_rate(config, step, 4) for step in range(4)] == pytest.approx([4e-4, 2.8e-4, 1.6e-4, 4e-5])
    assert policy_rate(config, 9, 4) == pytest.approx(4e-5), "a run prolonged by a resume goes on at the end rate"


def test_the_policy_rate_may_rise_stay_or_have_one_step() -> None:
    assert [policy_rate(Optimizer(lr=1e-6), step, 3) for step in range(3)] == [1e-6] * 3
    assert policy_rate(Optimizer(lr=1.0, lr_end=2.0), 1, 3) == pytest.approx(1.5)
    assert policy_rate(Optimizer(lr=1.0, lr_end=0.0), 0, 1) == 1.0
    assert policy_rate(Optimizer(lr=1.0, lr_end=0.0), 2, 3) == 0.0


def test_sft_warms_up_stays_and_falls() -> None:
    assert [sft_rate(sft(), step) for step in range(10)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_the_first_and_the_last_update_have_a_rate_above_zero() -> None:
    for config in (
        sft(),
        sft(steps=1),
        sft(warmup_steps=500),
        sft(decay_fraction=1.0),
        sft(warmup_steps=0, decay_fraction=0),
    ):
        assert all(0 < sft_rate(config, step) <= config.lr for step in range(config.steps))


def test_sft_without_warm_up_and_decay_is_constant() -> None:
    assert [sft_rate(sft(warmup_steps=0, decay_fraction=0), step) for step in range(3)] == [1, 1, 1]
