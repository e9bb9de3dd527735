"""Every loss against an independent float64 implementation (`loss_oracle`), and against what TRL's and veRL's own code gave
(`tests/published`): value and gradient, whole and in parts."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.config.loss import OWN
from forge_ray.train_loop.losses import MAXIMA, OBJECTIVES, LossInputs, Total, join, policy_loss
from tests.unit import loss_oracle
from tests.unit.loss_oracle import Token

DECOUPLED = {"old_policy": "recomputed"}
CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "kl": 0.1, "entropy": 0.01},
    "grpo k2 dual": {"name": "grpo", "kl": 0.1, "kl_kind": "k2", "clip_dual": 1.3, "reduction": "trajectory_mean"},
    "grpo decoupled": {"name": "grpo", **DECOUPLED, "stale": {"versions": 1}},
    "grpo token tis": {"name": "grpo", **DECOUPLED, "importance": {"level": "token", "cap": 1.2}},
    "grpo sequence tis": {"name": "grpo", **DECOUPLED, "importance": {"level": "sequence", "cap": 1.2}, "kl": 0.1},
    "grpo icepop": {"name": "grpo", **DECOUPLED, "importance": {"level": "token", "mode": "mask", "floor": 0.8, "cap": 1.3}},
    "grpo sequence mask": {"name": "grpo", **DECOUPLED, "importance": {"level": "sequence", "mode": "mask", "floor": 0.5, "cap": 2}},
    "grpo off-policy mask": {"name": "grpo", "stale": {"kl": 0.05}, "reduction": "sequence_mean"},
    "grpo and a teacher": {"name": "grpo", "distillation": {"teacher": "t", "coefficient": 0.3}},
    "grpo and a teacher's term": {"name": "grpo", "distillation": {"teacher": "t", "coefficient": 0.3, "form": "loss", "kind": "k3"}},
    "dr_grpo": {"name": "dr_grpo", "constant": 37},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.1, "kl": 0.1},
    "gspo by token": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.1, "reduction": "token_mean"},
    "cispo": {"name": "cispo", "clip_high": 0.2},
    "rloo": {"name": "rloo", "kl": 0.1, "kl_kind": "k2"},
    "rloo token tis": {"name": "rloo", "importance": {"level": "token", "cap": 1.2}},
    "rloo sequence tis": {"name": "rloo", "importance": {"level": "sequence", "cap": 1.2}},
    "reinforce_pp": {"name": "reinforce_pp", "kl": 0.2, "kl_discount": 0.9},
    "reinforce_pp k3": {"name": "reinforce_pp", "kl": 0.2, "kl_kind": "k3", **DECOUPLED},
    "distillation": {"name": "distillation", "distillation": {"teacher": "t"}},
    "distillation decoupled": {
        "name": "distillation",
        "distillation": {"teacher": "t"},
        **DECOUPLED,
        "importance": {"level": "token", "cap": 1.1},
    },
    "distillation as a term": {"name": "distillation", "distillation": {"teacher": "t", "form": "loss", "coefficient": 0.7}},
    "sft": {"name": "sft"},
}


def make_step(seed: int, empty: bool = False) -> loss_oracle.Step:
    draw = random.Random(seed)

    def call(advantage: float, weight: float) -> list[Token]:
        made, position = [], draw.randint(1, 9)
        for _ in range(draw.randint(1, 5)):
            own = -draw.random() * 3
            one, two, three, four = (own + draw.gauss(0, 0.4) for _ in range(4))
            position += draw.choice([1, 1, 1, 4])
            made.append(Token(own, one, two, three, four, draw.random() * 2, advantage, weight, draw.randint(0, 3), position))
        return made

    step = []
    for _ in range(0 if empty else draw.randint(1, 5)):
        advantage = draw.gauss(0, 1)
        step.append([call(advantage * draw.choice([1, 0.5]), draw.choice([1, 0.25])) for _ in range(draw.randint(1, 4))])
    return step


def flat(step: loss_oracle.Step, config: Loss) -> dict[str, Tensor]:
    """Fields of `LossInputs`, with sequence numbers that have gaps."""
    rows = [
        (token, rollout, 10 * rollout + call, sum(map(len, calls)))
        for rollout, calls in enumerate(step)
        for call, tokens in enumerate(calls)
        for token in tokens
    ]

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(row[0], name) for row in rows], dtype=torch.float64)

    made = {
        "logprobs": column("logprob"), "old_logprobs": column("rollout"), "reference_logprobs": column("reference"),
        "teacher_logprobs": column("teacher"), "entropy": column("entropy"), "advantages": column("advantage"), "weights": column("weight"),
        "staleness": column("staleness").long(), "position": column("position").long(),
        "trajectory": torch.tensor([row[1] for row in rows], dtype=torch.long),
        "sequence": torch.tensor([row[2] for row in rows], dtype=torch.long),
        "trajectory_tokens": torch.tensor([row[3] for row in rows], dtype=torch.float64),
    }  # fmt: skip
    if config.old_policy == "recomputed":
        made["proximal_logprobs"] = column("proximal")
    return made


def inputs_of(fields: Mapping[str, Any]) -> LossInputs:
    return LossInputs(**fields)


def run(config: Loss, fields: dict[str, Tensor], total: Total, keep: Tensor) -> tuple[float, Tensor, Tensor, dict[str, float]]:
    """Loss of a part, its gradients by all log-probabilities and entropies, its metrics."""
    logprobs, entropy = fields["logprobs"].clone().requires_grad_(), fields["entropy"].clone().requires_grad_()
    part = {name: value[keep] for name, value in {**fields, "logprobs": logprobs, "entropy": entropy}.items()}
    loss, metrics = policy_loss(config, inputs_of(part), total)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad, torch.zeros_like(entropy) if entropy.grad is None else entropy.grad, metrics


def total_of(step: loss_oracle.Step) -> Total:
    return Total(sum(len(c) for r in step for c in r), len(step), sum(len(r) for r in step))


def test_every_loss_is_tried() -> None:
    assert {Loss.model_validate(config).name for config in CONFIGS.values()} == set(OBJECTIVES)


@pytest.mark.parametrize("name", CONFIGS)
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    config = Loss.model_validate(CONFIGS[name])
    for seed in range(12):
        step = make_step(seed)
        fields = flat(step, config)
        value, gradient, by_entropy, metrics = run(config, fields, total_of(step), torch.arange(len(fields["logprobs"])))
        expected, slopes, logged = loss_oracle.loss(config, step)
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert gradient.tolist() == pytest.approx([one for rollout in slopes for call in rollout for one in call], rel=1e-12, abs=1e-12)
        assert bool(by_entropy.any()) == (config.entropy > 0 and bool(step))
        assert metrics["loss"] == value
        for key in set(metrics) & set(logged):
            assert metrics[key] == pytest.approx(logged[key])
        if config.importance.level != "none":
            assert {"importance", "importance_capped", "importance_max"} <= set(metrics)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.data())
def test_any_cut_into_parts_adds_up_to_the_whole(name: str, seed: int, parts: int, data: st.DataObject) -> None:
    config = Loss.model_validate(CONFIGS[name])
    step = make_step(seed)
    fields, total = flat(step, config), total_of(step)
    # The parts are micro-batches or ranks: sequences whole where the loss asks for it, else single tokens wherever they like.
    whole = config.needs_whole_sequences or config.reduction == "sequence_mean"
    owner = fields["sequence"] if whole else torch.arange(len(fields["sequence"]))
    place = {int(one): data.draw(st.integers(0, parts - 1)) for one in owner.unique()}
    of = torch.tensor([place[int(one)] for one in owner])
    order = torch.tensor(data.draw(st.permutations(range(len(of)))))
    cut = [run(config, fields, total, order[of[order] == part]) for part in range(parts + 1)]
    value, gradient, by_entropy, metrics = run(config, fields, total, torch.arange(len(of)))
    assert sum(part[0] for part in cut) == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert torch.allclose(torch.stack([part[1] for part in cut]).sum(0), gradient, atol=1e-12)
    assert torch.allclose(torch.stack([part[2] for part in cut]).sum(0), by_entropy, atol=1e-12)
    joined: dict[str, float] = {}
    for part in cut:
        assert set(part[3]) == set(metrics), "one set of names, whatever the part holds"
        join(joined, part[3])
    assert joined == pytest.approx(metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_nothing_under_a_mask_reaches_value_metric_or_gradient(name: str, poison: float) -> None:
    config = Loss.model_validate(CONFIGS[name])
    step = make_step(3)
    fields, total = flat(step, config), total_of(step)
    expected = run(config, fields, total, torch.arange(total.tokens))
    # A masked token of the same sequence stands before each one, with nonsense in every field.
    wide = {}
    for field, values in fields.items():
        bad = values.clone() if not values.is_floating_point() else torch.full_like(values, poison)
        wide[field] = torch.stack([bad, values], dim=1)
    mask = torch.tensor([False, True]).expand(total.tokens, 2)
    logprobs, entropy = wide["logprobs"].requires_grad_(), wide["entropy"].requires_grad_()
    loss, metrics = policy_loss(config, LossInputs(**{**wide, "logprobs": logprobs, "entropy": entropy, "mask": mask}), total)
    loss.backward()
    assert loss.item() == expected[0] and metrics == expected[3]
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad[:, 1], expected[1]) and not logprobs.grad[:, 0].any()


def test_the_published_code_says_the_same() -> None:
    made = json.loads((Path(__file__).parents[1] / "published" / "losses.json").read_text())
    inputs = {name: torch.tensor(value, dtype=torch.float64) for name, value in made["inputs"].items()}
    mask = inputs.pop("mask").bool()
    rollout = inputs.pop("rollout_logprobs")
    lengths = mask.sum(1, keepdim=True).expand_as(mask).double()
    rows = torch.arange(len(mask))[:, None].expand_as(mask)
    total = Total(int(mask.sum()), len(mask), len(mask))
    assert len(made["cases"]) == 20
    for name, case in made["cases"].items():
        config = Loss.model_validate(case["config"])
        fields: dict[str, Any] = {**inputs, "mask": mask, "sequence": rows, "trajectory": rows, "trajectory_tokens": lengths}
        if config.old_policy == "recomputed":
            fields |= {"proximal_logprobs": fields["old_logprobs"], "old_logprobs": rollout}
        fields["weights"] = torch.ones_like(rollout)
        fields["logprobs"] = fields["logprobs"].clone().requires_grad_()
        loss, _ = policy_loss(config, LossInputs(**fields), total)
        loss.backward()
        gradient = torch.tensor(case["gradient"], dtype=torch.float64)
        if name == "trl: rloo":  # its ratio has the value 1, ours is the score's: equal gradients, other values
            assert config.name == "rloo"
        else:
            # veRL adds 1e-8 to the length of a sequence.
            assert loss.item() == pytest.approx(case["loss"], rel=1e-8), name
        assert gradient.abs().max() > 1e-3 and torch.allclose(fields["logprobs"].grad, gradient, rtol=1e-7, atol=1e-9), name


def test_gspos_token_form_has_the_gradient_of_the_papers_sequence_form() -> None:
    config = Loss(name="gspo", clip_low=0.05, clip_high=0.1)
    for seed in range(8):
        step = make_step(seed)
        fields, total = flat(step, config), total_of(step)
        fields["weights"] = torch.ones_like(fields["weights"])
        _, gradient, _, _ = run(config, fields, total, torch.arange(total.tokens))
        logprobs = fields["logprobs"].clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for sequence in fields["sequence"].unique():
            own = fields["sequence"] == sequence
            ratio = (logprobs - fields["old_logprobs"])[own].mean().exp()
            advantage = fields["advantages"][own][0]
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.1) * advantage) / total.sequences
        (expected,) = torch.autograd.grad(loss, logprobs)
        assert torch.allclose(gradient, expected, atol=1e-12)


def test_reinforce_pp_discounts_over_what_is_masked_and_counts_none_of_it() -> None:
    # Mask 1 0 0 1 with KL 1 everywhere: −(1 + 0.9³), not −(1 + 0.9 + 0.9² + 0.9³).
    config = Loss(name="reinforce_pp", kl=1, kl_discount=0.9)
    logprobs = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    ones = torch.ones_like(logprobs)
    inputs = LossInputs(
        logprobs=logprobs, old_logprobs=0 * ones, reference_logprobs=-ones, advantages=0 * ones, weights=ones,
        sequence=torch.zeros(1, 4, dtype=torch.long), position=torch.arange(4)[None], mask=torch.tensor([[1, 0, 0, 1]]),
    )  # fmt: skip
    loss, metrics = policy_loss(config, inputs, Total(2, 1, 1))
    loss.backward()
    assert logprobs.grad is not None
    # At ratio 1 the gradient is minus the advantage, over two tokens.
    assert (-2 * logprobs.grad[0]).tolist() == pytest.approx([-1.729, 0, 0, -1])
    assert metrics["reward_kl"] == 1


def test_reinforce_pps_discount_ends_with_the_sequence_however_long_it_is() -> None:
    # The second sequence begins 3000 places before the first one ends: 0.9 to that power would be infinite.
    config = Loss(name="reinforce_pp", kl=1, kl_discount=0.9)
    position = torch.arange(1, 3001).repeat(2)
    sequence = torch.arange(2).repeat_interleave(3000)
    logprobs = torch.zeros(6000, requires_grad=True)
    ones = torch.ones(6000)
    inputs = LossInputs(
        logprobs=logprobs, old_logprobs=0 * ones, reference_logprobs=-ones, advantages=0 * ones, weights=ones, sequence=sequence,
        position=position,
    )  # fmt: skip
    policy_loss(config, inputs, Total(6000, 2, 2))[0].backward()
    assert logprobs.grad is not None
    expected = (1 - 0.9 ** (3001 - position.double())) / (1 - 0.9)
    assert torch.allclose(6000 * logprobs.grad.double(), expected, rtol=1e-4)


def test_the_largest_weight_is_joined_by_its_maximum() -> None:
    into: dict[str, float] = {}
    for value in (1.5, 4.0, 2.0):
        join(into, {"importance_max": value, "importance": 0.5})
    assert into == {"importance_max": 4.0, "importance": 1.5} and {"importance_max"} == MAXIMA


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kl": 0.1, "kl_kind": "k1"}, "k2 or k3"),
        ({"name": "gspo", "importance": {"level": "token"}}, "old_policy = recomputed"),
        ({"name": "distillation"}, "section distillation"),
        ({"name": "sft", "distillation": {"teacher": "t"}}, "name = distillation"),
        ({"importance": {"floor": 3}}, "floor"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Loss.model_validate(config)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"name": "gspo"}, "sequence"),
        ({"name": "reinforce_pp", "kl": 0.1}, "reference_logprobs"),
        ({"name": "distillation", "distillation": {"teacher": "t"}}, "teacher_logprobs"),
        ({"name": "distillation", "distillation": {"teacher": "t", "form": "loss"}}, "teacher_logprobs"),
        ({"stale": {"versions": 1}}, "staleness"),
    ],
)
def test_an_input_that_a_loss_needs_is_asked_for_by_name(config: dict[str, Any], field: str) -> None:
    made = Loss.model_validate(config)
    fields = flat(make_step(1), made)
    del fields[field]
    with pytest.raises(ValueError, match=field):
        policy_loss(made, inputs_of(fields), Total(9, 1, 1))


def test_the_page_has_every_loss_with_what_it_uses_by_itself() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    rows = {cells[0].strip("`"): cells for line in page.splitlines() if len(cells := [c.strip() for c in line.strip("|").split("|")]) == 6}
    assert set(OBJECTIVES) <= set(rows)
    for name, own in OWN.items():
        said = rows[name]
        assert [said[2], said[3]] == [str(own.get("clip_low", "")), str(own.get("clip_high", ""))], name
        assert said[4] == f"`{own['reduction']}`", name
