"""Losses against numbers computed by hand: clipping, KL, masks, and reductions that add up over micro-batches and ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop import losses
from forge_ray.train_loop.losses import LossInputs, NotFinite, Total, denominator, sft_loss
from forge_ray.train_loop.losses.grpo import clipped
from forge_ray.train_loop.losses.kl import k3

NAN = math.nan
REDUCTIONS = {
    "token_mean": Loss(kl=0.1, entropy=0.01),
    "trajectory_mean": Loss(kl=0.1, entropy=0.01, reduction="trajectory_mean"),
    "constant": Loss(kl=0.1, entropy=0.01, reduction="constant", constant=7.0),
}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def policy_loss(config: Loss, *, total: Total, **inputs: Any) -> tuple[Tensor, dict[str, float]]:
    return losses.policy_loss(config, LossInputs(**inputs), total)


def loss_of(logprobs: Tensor, advantages: Tensor, total: Total, config: Loss | None = None, **more: Any) -> tuple[Tensor, dict[str, float]]:
    more = {"old_logprobs": logprobs.detach(), "weights": torch.ones_like(advantages), **more}
    return policy_loss(config or Loss(), logprobs=logprobs, advantages=advantages, total=total, **more)


# --- one token -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 1.0, -1.2, -1.2),  # inside the upper bound of 1.28
        (1.5, 1.0, -1.28, 0.0),  # cut: no more reward for going further
        (0.5, 1.0, -0.5, -0.5),  # a good token that became rarer is never cut
        (0.5, -1.0, 0.8, 0.0),  # cut at 1 - 0.2
        (0.9, -1.0, 0.9, 0.9),
        (1.5, -1.0, 1.5, 1.5),  # a bad token that became likelier is never cut
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_the_clip_is_asymmetric_and_pessimistic(ratio: float, advantage: float, loss: float, slope: float) -> None:
    old = tensor(-1.5)
    logprobs = (old + math.log(ratio)).requires_grad_()
    value, metrics = loss_of(logprobs, tensor(advantage), Total(1, 1), old_logprobs=old)
    value.backward()
    assert value.item() == pytest.approx(loss) and metrics["loss"] == value.item() and metrics["policy_loss"] == pytest.approx(loss)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope)
    assert metrics["ratio"] == pytest.approx(ratio)
    assert metrics["clip_high"] == (slope == 0 and advantage > 0)
    assert metrics["clip_low"] == (slope == 0 and advantage < 0)
    assert metrics["logprob_difference"] == pytest.approx(abs(math.log(ratio)))
    assert metrics["old_kl"] == pytest.approx(1 / ratio - 1 + math.log(ratio))


def test_k3_by_hand() -> None:
    # policy 1/2, reference 1/4: 1/2 - log(1/2) - 1; equal: 0
    assert k3(tensor(math.log(0.5), -1.0), tensor(math.log(0.25), -1.0)).tolist() == pytest.approx([0.5 + math.log(2) - 1, 0.0])


def test_kl_and_entropy_enter_with_their_coefficients() -> None:
    config = Loss(kl=0.1, entropy=0.01)
    logprobs = tensor(math.log(0.5)).requires_grad_()
    value, metrics = loss_of(logprobs, tensor(3.0), Total(1, 1), config, reference_logprobs=tensor(math.log(0.25)), entropy=tensor(1.25))
    kl = 0.5 + math.log(2) - 1
    assert value.item() == pytest.approx(-3 + 0.1 * kl - 0.01 * 1.25)
    assert metrics["kl"] == pytest.approx(kl) and metrics["entropy"] == 1.25 and metrics["policy_loss"] == pytest.approx(-3)
    value.backward()
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-3 + 0.1 * (1 - 0.5))


def test_entropy_without_a_coefficient_is_only_logged() -> None:
    value, metrics = loss_of(tensor(-1.0), tensor(2.0), Total(1, 1), entropy=tensor(1.25))
    assert value.item() == -2 and metrics["entropy"] == 1.25


def test_a_weight_scales_everything_at_its_token() -> None:
    config = Loss(kl=0.1)
    inputs = {"reference_logprobs": tensor(-3.0)}
    whole, _ = loss_of(tensor(-1.0), tensor(2.0), Total(1, 1), config, **inputs)
    half, _ = loss_of(tensor(-1.0), tensor(2.0), Total(1, 1), config, weights=tensor(0.5), **inputs)
    assert half.item() == pytest.approx(whole.item() / 2)


@pytest.mark.parametrize(("config", "missing"), [(Loss(kl=0.1), "reference_logprobs"), (Loss(entropy=0.1), "entropy")])
def test_a_coefficient_without_its_input_is_an_error(config: Loss, missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        loss_of(tensor(-1.0), tensor(1.0), Total(1, 1), config)


def test_a_huge_ratio_overflows_neither_value_nor_gradient() -> None:
    logprobs = tensor(0.0, -900.0).float().requires_grad_()
    value, _ = loss_of(
        logprobs,
        tensor(-1.0, -1.0).float(),
        Total(2, 1),
        Loss(kl=0.1),
        old_logprobs=tensor(-900.0, 0.0).float(),
        reference_logprobs=tensor(-900.0, 0.0).float(),
    )
    value.backward()
    assert logprobs.grad is not None and math.isfinite(value.item()) and bool(torch.isfinite(logprobs.grad).all())


# --- masks ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", REDUCTIONS.values(), ids=REDUCTIONS)
@pytest.mark.parametrize(
    "poison", ["logprobs", "old_logprobs", "advantages", "weights", "reference_logprobs", "entropy", "trajectory_tokens"]
)
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_nothing_under_a_mask_reaches_value_metric_or_gradient(config: Loss, poison: str, value: float) -> None:
    def run(inputs: dict[str, list[float]], mask: Tensor | None) -> tuple[float, dict[str, float], list[float]]:
        tensors: dict[str, Any] = {name: torch.tensor(values, dtype=torch.float64) for name, values in inputs.items()}
        theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        tensors["logprobs"] = tensors["logprobs"] + theta
        tensors["entropy"] = tensors["entropy"] + 2 * theta
        loss, metrics = policy_loss(config, total=Total(1, 1), mask=mask, **tensors)
        loss.backward()
        assert theta.grad is not None
        return loss.item(), metrics, theta.grad.tolist()

    one = {
        "logprobs": [0.0],
        "old_logprobs": [0.0],
        "advantages": [1.0],
        "weights": [1.0],
        "reference_logprobs": [-1.0],
        "entropy": [0.5],
        "trajectory_tokens": [1.0],
    }
    two = {name: [*values, value if name == poison else 1.0] for name, values in one.items()}
    assert run(two, torch.tensor([True, False])) == run(one, None)


def test_the_same_nan_under_mask_one_stops_by_name_and_place() -> None:
    for name in ("logprobs", "old_logprobs", "advantages", "weights", "reference_logprobs", "entropy"):
        inputs: dict[str, Any] = {
            n: tensor(0.0, 0.0) for n in ("logprobs", "old_logprobs", "advantages", "weights", "reference_logprobs", "entropy")
        }
        inputs[name] = tensor(0.0, NAN)
        with pytest.raises(NotFinite, match=f"^{name} is NaN or infinite at 1 trained position.*g7-0.0, token 41") as caught:
            policy_loss(REDUCTIONS["token_mean"], total=Total(2, 1), describe=lambda index: f"g7-0.0, token {40 + index}", **inputs)
        assert caught.value.name == name


def test_a_token_that_the_engine_found_impossible_stops_too() -> None:
    with pytest.raises(NotFinite, match="old_logprobs"):
        loss_of(tensor(-1.0), tensor(1.0), Total(1, 1), old_logprobs=tensor(-math.inf))


def test_sft_masks_and_names_as_well() -> None:
    logprobs = tensor(-1.0, NAN, -2.0).requires_grad_()
    loss, metrics = sft_loss(logprobs, total=Total(2, 1), mask=torch.tensor([True, False, True]))
    loss.backward()
    assert loss.item() == metrics["loss"] == 1.5
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-0.5, 0, -0.5]
    with pytest.raises(NotFinite, match="logprobs"):
        sft_loss(logprobs, total=Total(3, 1))


# --- reductions ----------------------------------------------------------------------------------------------------------------------


def shared(values: list[float], total: Total, config: Loss | None = None, **more: Any) -> tuple[float, dict[str, float], float]:
    """Loss, metrics, and the gradient by a parameter that is every log-probability; token i has loss and slope `values[i]`."""
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    loss, metrics = loss_of(theta.expand(len(values)), -tensor(*values), total, config, **more)
    loss.backward()
    assert theta.grad is not None
    return loss.item(), metrics, theta.grad.item()


def test_the_token_mean_is_no_mean_of_means() -> None:
    # 4 tokens with loss 1 and 10 tokens with loss 3: 34 / 14; the mean of the means would be 2.
    total = Total(14, 2)
    parts = [shared([1.0] * 4, total), shared([3.0] * 10, total), shared([], total)]
    whole = shared([1.0] * 4 + [3.0] * 10, total)
    for run in (whole, tuple(map(sum, zip(*((loss, 0, slope) for loss, _, slope in parts), strict=True)))):
        assert run[0] == pytest.approx(34 / 14) and run[2] == pytest.approx(34 / 14)
    assert whole[1]["loss"] == pytest.approx(34 / 14), "the logged loss is the same number"
    for name in whole[1]:
        assert sum(metrics[name] for _, metrics, _ in parts) == pytest.approx(whole[1][name])


def test_the_trajectory_mean_weighs_trajectories_alike() -> None:
    # One trajectory of 4 tokens with loss 1, one of 10 with loss 3: (1 + 3) / 2, wherever its samples lie.
    config = Loss(reduction="trajectory_mean")
    lengths = tensor(*[4.0] * 4 + [10.0] * 10)
    assert shared([1.0] * 4 + [3.0] * 10, Total(14, 2), config, trajectory_tokens=lengths)[0] == pytest.approx(2)
    parts = [
        shared(values, Total(14, 2), config, trajectory_tokens=lengths[at : at + len(values)])
        for at, values in ((0, [1.0] * 4), (4, [3.0] * 3), (7, [3.0] * 7))
    ]
    assert sum(loss for loss, _, _ in parts) == pytest.approx(2) and sum(slope for _, _, slope in parts) == pytest.approx(2)
    with pytest.raises(ValueError, match="trajectory_tokens"):
        shared([1.0], Total(1, 1), config)


def test_the_constant_divides_the_sum() -> None:
    assert shared([1.0] * 4 + [3.0] * 10, Total(14, 2), Loss(reduction="constant", constant=17.0))[0] == pytest.approx(2)


@pytest.mark.parametrize("config", REDUCTIONS.values(), ids=REDUCTIONS)
def test_a_part_without_a_token_is_zero_with_a_gradient(config: Loss) -> None:
    theta = torch.ones(1, requires_grad=True)
    nothing = theta.expand(3)[:0]
    for total in (Total(0, 0), Total(14, 2)):
        loss, metrics = policy_loss(
            config,
            logprobs=nothing,
            old_logprobs=nothing.detach(),
            advantages=nothing.detach(),
            weights=nothing.detach(),
            reference_logprobs=nothing.detach(),
            entropy=nothing,
            trajectory_tokens=nothing.detach(),
            total=total,
        )
        loss.backward()
        assert loss.item() == 0 and set(metrics.values()) == {0} and theta.grad is not None and theta.grad.item() == 0
        assert sft_loss(nothing, total=total)[0].item() == 0
    assert denominator(config, Total(0, 0)) > 0


finite = st.floats(-4, 0).map(lambda value: round(value, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(REDUCTIONS)),
    st.lists(st.tuples(finite, finite, finite, finite, st.floats(-2, 2), st.integers(0, 3)), min_size=1, max_size=24),
    st.data(),
)
def test_any_partition_adds_up_to_the_whole(
    name: str, tokens: list[tuple[float, float, float, float, float, int]], data: st.DataObject
) -> None:
    config = REDUCTIONS[name]
    owners = [token[5] for token in tokens]
    total = Total(len(tokens), len(set(owners)))
    new, old, reference, entropy, advantages, _ = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    lengths = torch.tensor([owners.count(owner) for owner in owners], dtype=torch.float64)

    def run(keep: list[int]) -> tuple[float, dict[str, float], Tensor]:
        index = torch.tensor(keep, dtype=torch.long)
        logprobs = new.clone().requires_grad_()
        loss, metrics = policy_loss(
            config,
            logprobs=logprobs[index],
            old_logprobs=old[index],
            advantages=advantages[index],
            weights=torch.ones(len(keep), dtype=torch.float64),
            reference_logprobs=reference[index],
            entropy=-entropy[index],
            trajectory_tokens=lengths[index],
            total=total,
        )
        loss.backward()
        assert logprobs.grad is not None
        return loss.item(), metrics, logprobs.grad

    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))
    parts = [run([n for n, part in enumerate(part_of) if part == p]) for p in range(4)]
    whole = run(list(range(len(tokens))))
    assert sum(part[0] for part in parts) == pytest.approx(whole[0], abs=1e-9)
    assert torch.allclose(sum((part[2] for part in parts), torch.zeros_like(new)), whole[2], atol=1e-12)
    for metric in whole[1]:
        assert sum(part[1][metric] for part in parts) == pytest.approx(whole[1][metric], abs=1e-9)


def test_padded_and_flat_shapes_are_the_same_loss() -> None:
    flat, _ = loss_of(tensor(-1.0, -2.0, -3.0), tensor(1.0, 2.0, -1.0), Total(3, 2), old_logprobs=tensor(-1.1, -1.9, -3.2))
    padded, _ = loss_of(
        torch.tensor([[NAN, -1.0, NAN], [-2.0, NAN, -3.0]]).double(),
        torch.tensor([[9.0, 1.0, 9.0], [2.0, 9.0, -1.0]]).double(),
        Total(3, 2),
        old_logprobs=torch.tensor([[0, -1.1, 0], [-1.9, 0, -3.2]]).double(),
        mask=torch.tensor([[0, 1, 0], [1, 0, 1]]),
    )
    assert padded.item() == pytest.approx(flat.item(), rel=1e-6)


def test_the_clip_is_linear_in_the_advantage_so_that_credit_can_scale_it() -> None:
    logprobs, old = tensor(-1.0, -1.0, -3.0), tensor(-2.0, -0.5, -1.0)
    one, _ = clipped(Loss(), (logprobs - old).exp(), tensor(1.0, -1.0, -1.0))
    quarter, _ = clipped(Loss(), (logprobs - old).exp(), tensor(0.25, -0.25, -0.25))
    assert torch.allclose(one / 4, quarter)
