"""Strategies: one and two workers, plain and DeepSpeed ZeRO 1 to 3, all weights and adapters, make the same steps; and go on exactly."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from safetensors.torch import load_file

from forge_ray.config import Config
from forge_ray.train_loop import checkpoint, forward, sft
from forge_ray.train_loop.forward import Row
from forge_ray.train_loop.part import Passes
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.rows import Rows
from forge_ray.train_loop.strategies import Strategy
from tests.unit import learning

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make env EXTRAS=cpu,smollm2,deepspeed,dev") if (
    os.environ.get("CI") != "true"
) else None

STEPS = 10
AT = 5
"""Step whose checkpoint a second learner goes on from."""
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero-1": {"strategy": "deepspeed", "deepspeed": {"zero": 1}},
    "zero-2": {"strategy": "deepspeed", "deepspeed": {"zero": 2}},
    "zero-3": {"strategy": "deepspeed", "deepspeed": {"zero": 3}},
    "lora ddp": {"strategy": "ddp", "lora": {"rank": 4}},
    "lora zero-3": {"strategy": "deepspeed", "deepspeed": {"zero": 3}, "lora": {"rank": 4}},
}


SUPERVISED = [("ddp", "rows"), ("ddp", "tree"), ("zero-1", "rows"), ("zero-2", "tree"), ("zero-3", "rows"), ("zero-3", "tree")]


def settings(**own: Any) -> Config:
    return learning.config(
        steps=STEPS,
        loss={"kl": 0.01, "entropy": 0.001},
        # Micro-batches that differ in number from rank to rank.
        optimizer={"lr": 1e-3, "lr_end": 1e-4, "epochs": 2, "microbatch_tokens": 40},
        **own,
    )


def mine(rows: list[Row], ranks: Ranks, step: int) -> list[Row]:
    """All but the last for the first of two ranks, the last for the other; in two steps, one after the other, all for the first."""
    last = len(rows) - (step not in (2, 3))
    return rows if ranks.world == 1 else (rows[:last] if ranks.rank == 0 else rows[last:])


def whole(learner: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.strategy.tensors()}


def train(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """For each kind: metrics of all steps, trained tensors at the end, and the same of a learner that went on from the middle."""
    found = {}
    for kind, own in KINDS.items():
        place = learning.with_model(folder / kind) if ranks.rank == 0 else folder / kind
        ranks.meet()
        learner = learning.learner_of(settings(**own), place, ranks)
        straight, seen, stale = [], [], []
        for step in range(STEPS):
            fresh = learning.sampled(learner, mine(learning.rollouts(step), ranks, step))
            # Half of a step's rollouts are from the version before: they are checked against its weights.
            batch = Rows([*stale, *copy.deepcopy(list(fresh.rows))])
            stale = [Row(**{**vars(row), "name": f"stale {row.name}"}) for row in fresh.rows]
            assert bool(batch.rows) == (step != 3 or ranks.rank == 0), "one step leaves a rank without work"
            seen.append(copy.deepcopy(batch))
            straight.append(learner.train(batch))
            _, published = learner.publish()
            if learner.step == AT:
                learner.save(straight[-1])
        end = whole(learner)
        again = learning.learner_of(settings(**own), place, ranks)
        assert again.step == AT
        resumed = [again.train(batch) for batch in seen[AT:]]
        sent = None if published is None else load_file(published)
        found[kind] = {"straight": straight, "end": end, "resumed": resumed, "resumed end": whole(again), "published": sent}
    found["sft"] = {(kind, how): supervised(ranks, folder / f"sft {kind} {how}", how, KINDS[kind]) for kind, how in SUPERVISED}
    return found


def supervised(ranks: Ranks, folder: Path, builder: str, own: dict[str, Any]) -> list[float]:
    """Losses of a learner's supervised start, in batches of five, of which two ranks take three and two; the sum of the weights that it
    goes on with behind them."""
    if ranks.rank == 0:
        learning.with_model(folder)
    ranks.meet()
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, learning.VOCABULARY, (int(length),), generator=draw).tolist() for length in range(6, 26)]
    masks = [[number > 2 for number in range(len(one))] for one in ids]
    rows = forward.demonstration_rows(pyarrow.table({"ids": ids, "mask": masks}))
    recipe = {"demonstrations": "d", "steps": STEPS, "batch_size": 5, "builder": builder}
    config, losses = learning.config(sft=recipe, optimizer={"microbatch_tokens": 40}, **own), []

    def supervise(strategy: Strategy, passes: Passes) -> None:
        assert config.train.sft is not None
        sft.train(strategy, rows, config.train.sft, 7, passes=passes, report=lambda _, loss: losses.append(loss))

    learner = learning.learner_of(config, folder, ranks, supervise=supervise)
    assert not {"optimizer.pt", "deepspeed"} & {file.name for file in checkpoint.path(learner.run, 0).iterdir()}
    assert learning.learner_of(config, folder, ranks).step == 0, "it is not made again"
    return [*losses, sum(float(value.double().abs().sum()) for value in whole(learner).values()) / 1e3]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return learning.in_groups([1, 2], tmp_path_factory.mktemp("strategies"), train)


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_and_two_have_the_same_losses(runs: list[list[Any]], kind: str) -> None:
    like = "lora ddp" if "lora" in kind else "ddp"
    expected = [step["loss"] for step in runs[0][0][like]["straight"]]
    assert len({round(loss, 5) for loss in expected}) == STEPS, "every step has a loss of its own"
    for (one,) in (runs[0],):
        assert [step["loss"] for step in one[kind]["straight"]] == pytest.approx(expected, abs=1e-5)
    for rank in runs[1]:
        for name in ("loss", "kl", "entropy"):
            assert [step[name] for step in rank[kind]["straight"]] == pytest.approx(
                [step[name] for step in runs[0][0][like]["straight"]], abs=1e-5
            ), name
        assert [step["grad_norm"] for step in rank[kind]["straight"]] == pytest.approx(
            [step["grad_norm"] for step in runs[0][0][like]["straight"]], rel=1e-3
        )
        assert all(step["updates"] == 2 and step["logprob_diff"] < 1e-6 for step in rank[kind]["straight"])


@pytest.mark.parametrize("way", SUPERVISED, ids=" ".join)
def test_the_supervised_start_shares_a_batch_out_and_loses_nothing(runs: list[list[Any]], way: tuple[str, str]) -> None:
    (alone,), both = runs
    expected = alone["sft"]["ddp", "rows"]
    assert len(set(expected)) == STEPS + 1
    for rank in (alone, *both):
        assert rank["sft"][way] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_learner_makes_the_same_steps_bit_for_bit(runs: list[list[Any]], kind: str) -> None:
    for group in runs:
        for rank in group:
            own = rank[kind]
            # The weights of before the checkpoint are gone: what they sampled is no longer checked in the first step.
            checks = ("logprob_diff", "checked_tokens")
            trained = [[{k: v for k, v in step.items() if k not in checks} for step in own[name]] for name in ("straight", "resumed")]
            assert trained[1] == trained[0][AT:]
            assert own["end"].keys() == own["resumed end"].keys()
            assert all(torch.equal(own["end"][name], own["resumed end"][name]) for name in own["end"])


def test_what_is_published_is_what_was_trained(runs: list[list[Any]]) -> None:
    for group in runs:
        for kind in KINDS:
            sent, end = group[0][kind]["published"], {name.replace(".default.weight", ""): v for name, v in group[0][kind]["end"].items()}
            assert sent.keys() == end.keys() and all(torch.equal(sent[name], end[name]) for name in end)
            assert all(rank[kind]["published"] is None for rank in group[1:]), "rank 0 alone writes"


def test_every_rank_ends_with_the_same_weights_and_adapters_leave_the_base_alone(runs: list[list[Any]]) -> None:
    for kind in KINDS:
        first, second = (rank[kind]["end"] for rank in runs[1])
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert all(("lora_" in name) == ("lora" in kind) for name in first)
