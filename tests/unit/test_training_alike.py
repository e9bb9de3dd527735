"""Every loss has one gradient, whatever made it of a step's rollouts: builder, packing, cut into passes, share of a rank.

The rollouts are as hard as recordings may be: retries, sub-agents, rewritten histories, replies of one token and of more than a pass holds,
several versions in a call, the same reply of two rollouts, rollouts without a call, failed ones, groups whose rewards are all equal,
rewards of single calls, three temperatures.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from forge_ray.config import Loss, Train
from forge_ray.train_loop import attention, parts
from forge_ray.train_loop.losses import LossInputs, Total, join, policy_loss
from forge_ray.train_loop.part import Part, Passes, Work
from forge_ray.trajectories import batch, split
from tests.unit import learning
from tests.unit.making import make_call, make_record
from tests.unit.test_losses_published import CONFIGS

WAYS = [
    # builder, span of a trie, packed, tokens of a pass, ranks
    ("per_call", "step", False, 1_000_000, 1),
    ("per_call", "step", True, 20, 1),
    ("chain", "step", False, 30, 2),
    ("chain", "step", True, 1_000_000, 1),
    ("tree", "step", False, 13, 2),
    ("tree", "rollout", False, 25, 1),
]


def groups(seed: int) -> list[batch.Group]:
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(1, learning.VOCABULARY) for _ in range(draw.randint(least, most))]

    def rollout(name: str, prompt: list[int]) -> list[Any]:
        calls: list[Any] = []
        for order in range(draw.randint(0 if draw.random() < 0.2 else 1, 4)):
            how = draw.random()
            if how < 0.15 and calls:  # a retry
                prompt = list(calls[-1].prompt_ids)
            elif how < 0.3:
                prompt = tokens(1, 9)
            elif calls:
                prompt = [*calls[-1].prompt_ids, *calls[-1].ids, *tokens(0, 4)]
            ids = [7, 7, 7] if draw.random() < 0.2 else tokens(*draw.choice([(1, 1), (3, 8), (40, 40)]))
            cut = draw.randint(0, len(ids))
            calls.append(
                make_call(
                    prompt,
                    ids,
                    order=order,
                    session=name,
                    logprobs=[-3.6 + draw.gauss(0, 0.5) for _ in ids],
                    spans=[("0.1", 0, cut), ("0.3", cut, len(ids))] if 0 < cut < len(ids) else [("0.2", 0, len(ids))],
                    sampling={"temperature": draw.choice([0.5, 1.0, 2.0])},
                    kind=draw.choice(["agent", "agent", "subagent", "aux"]),
                    masked_by_grammar=draw.random() < 0.1,
                    delivered=draw.random() > 0.1,
                )
            )
        return calls

    prompts, made = [tokens(1, 12), tokens(1, 12)], []
    for group in range(3):
        equal = group == 2
        made.append([])
        for slot in range(3):
            name = f"g{group:05d}-{slot}.0"
            reward = None if draw.random() < 0.1 else 1.0 if equal else draw.choice([0.0, 0.5, 1.0])
            own = {str(draw.randrange(3)): draw.choice([-1.0, 0.5])} if draw.random() < 0.4 else {}
            made[-1].append((make_record(name, reward, group=group, call_rewards=own), rollout(name, draw.choice(prompts))))
    return made


def models(packed: bool) -> list[Any]:
    """The policy, the reference, the teacher, and the policy before the step."""
    made = [learning.small_model(seed) for seed in range(4)]
    for model in made if packed else ():
        attention.use(model)
    return made


def trained(config: Loss, own: list[Part], nets: list[Any], passes: Passes) -> tuple[torch.Tensor, dict[str, float], Total]:
    """The gradient and the metrics of an update whose ranks have these parts."""
    policy, reference, teacher, before = nets
    total = Total(*(sum(counts) for counts in zip(*(part.total() for part in own), strict=True)))
    metrics: dict[str, float] = {}

    def loss(inputs: LossInputs) -> torch.Tensor:
        share, shown = policy_loss(config, inputs, total)
        join(metrics, shown)
        return share

    def backward(share: torch.Tensor, last: bool) -> None:
        share.backward()

    for part in own:
        if config.kl > 0:
            part = part.with_scores("reference_logprobs", part.score(reference, passes))
        if config.distillation is not None:
            part = part.with_scores("teacher_logprobs", part.score(teacher, passes))
        if config.old_policy == "recomputed":
            part = part.with_scores("proximal_logprobs", part.score(before, passes))
        whole, entropy = config.needs_whole_sequences, config.entropy > 0
        part.accumulate(Work(policy, passes, loss, backward, 3, whole_sequences=whole, entropy_gradient=entropy))
    gradient = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in policy.parameters()])
    policy.zero_grad(set_to_none=True)
    return gradient.double(), metrics, total


@pytest.mark.parametrize("seed", [0, 11])
def test_every_way_to_train_a_step_has_the_same_gradient_and_the_same_metrics(seed: int) -> None:
    torch.set_num_threads(1)
    step, nets = groups(seed), {packed: models(packed) for packed in (False, True)}
    for name, raw in CONFIGS.items():
        config, found = Loss.model_validate(raw), []
        for builder, span, packed, tokens, ranks in WAYS:
            train = Train.model_validate({"builder": builder, "loss": raw, "tree": {"span": span}, "group_size": 3})
            passes = Passes(learning.CPU, tokens, packed=packed)
            table = batch.build_step(step, train, version=3).table
            tables = [table] if ranks == 1 else split.split(table, ranks)
            found.append(trained(config, [parts.of(one, train, passes) for one in tables], nets[packed], passes))
        wanted, metrics, total = found[0]
        assert total.tokens > 50 and wanted.norm() > 1e-4, name
        for way, (gradient, shown, counted) in zip(WAYS[1:], found[1:], strict=True):
            assert counted == total, (name, way)
            assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5, (name, way)
            assert shown == pytest.approx(metrics, rel=1e-4, abs=1e-4), (name, way)
