"""Tries over several ranks: the gradients of one, with plain sums and with DeepSpeed ZeRO 1 to 3, whose passes must keep step."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_ray.train_loop.part import Passes
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.strategies.ddp import sum_gradients
from forge_ray.train_loop.tree.forest import Forest
from forge_ray.train_loop.tree.tries import Tries
from tests.unit import learning
from tests.unit.tries import CPU, Sampled, by_tree, call_by_call, distance, exact_norms, losses, session, small_model, taken, trie

if importlib.util.find_spec("deepspeed") is None and os.environ.get("CI") != "true":
    pytest.skip("DeepSpeed is not installed: make env EXTRAS=cpu,smollm2,deepspeed,dev", allow_module_level=True)

WORLDS = [2, 4]
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero-1": {"strategy": "deepspeed", "deepspeed": {"zero": 1}},
    "zero-2": {"strategy": "deepspeed", "deepspeed": {"zero": 2}},
    "zero-3": {"strategy": "deepspeed", "deepspeed": {"zero": 3}},
    "lora ddp": {"strategy": "ddp", "lora": {"rank": 4}},
    "lora zero-3": {"strategy": "deepspeed", "deepspeed": {"zero": 3}, "lora": {"rank": 4}},
}
STEPS = 2


def rollouts(seed: int = 17) -> list[Sampled]:
    """Five rollouts of one prompt, of different lengths."""
    return [
        call for number in range(5) for call in session(np.random.default_rng(seed), number, turns=1 + number, strip=True, vocabulary=40)
    ]


def share(ranks: Ranks, one: Forest) -> Forest:
    """Of four ranks the last has nothing to do."""
    return one.select(one.owner % (ranks.world if ranks.world < 4 else 3) == ranks.rank)


def work(ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    one = trie(rollouts(), "abcde")
    with exact_norms():
        net = small_model()
        for lockstep in (False, True):
            part = Tries(share(ranks, one), 30 + 20 * ranks.rank)
            by_tree(net, part, losses(), one.total(), passes=Passes(CPU, 4096, ranks, lockstep=lockstep))
            sum_gradients(list(net.parameters()), ranks)
            found[f"float64 {lockstep}"] = taken(net)
    if ranks.world == 2:
        for kind, own in KINDS.items():
            found[kind] = train(ranks, folder / kind, **own)
    return found


def train(ranks: Ranks, folder: Path, **own: Any) -> dict[str, Any]:
    """Steps of a learner: metrics, and the weights at the end."""
    if ranks.rank == 0:
        learning.with_model(folder)
    ranks.meet()
    settings = learning.config(
        steps=STEPS, builder="tree", tree={"piece_tokens": 45}, logprob_bound=1e3,
        loss={"kl": 0.01, "entropy": 0.001, "name": "grpo"}, optimizer={"lr": 1e-3, "minibatches": 2}, **own,
    )  # fmt: skip
    learner = learning.learner_of(settings, folder, ranks)
    # The same updates whatever the ranks: each minibatch of the whole is shared out.
    parts: list[Any] = [Shared(trie(rollouts(step), "abcde"), 45, ranks=ranks) for step in range(STEPS)]
    seen = [learner.train(part) for part in parts]
    return {"seen": seen, "end": {name: value.clone() for name, value in learner.strategy.tensors()}}


@dataclass(frozen=True)
class Shared(Tries):
    """A part of which this rank takes its share of each minibatch."""

    ranks: Ranks = field(default_factory=Ranks)

    def minibatches(self, parts: int, seed: int | str | None = None) -> list[Tries]:
        made = super().minibatches(parts, seed)
        return [part.select(part.forest.owner % self.ranks.world == self.ranks.rank) for part in made]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return learning.in_groups(WORLDS, tmp_path_factory.mktemp("tree"), work)


def test_ranks_that_share_out_the_rollouts_add_up_to_call_by_call(runs: list[list[dict[str, Any]]]) -> None:
    with exact_norms():
        net, calls = small_model(), rollouts()
        call_by_call(net, calls, losses(), trie(calls, "abcde").total())
        wanted = taken(net)
    for group in runs:
        for rank in group:
            for lockstep in (False, True):
                assert distance(rank[f"float64 {lockstep}"], wanted) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_steps_under_each_strategy_are_those_of_one_process(
    runs: list[list[dict[str, Any]]], kind: str, one_process: dict[str, dict[str, Any]]
) -> None:
    alone = one_process["lora ddp" if "lora" in kind else "ddp"]
    assert ("lora" in kind) == all("lora_" in name for name in alone["end"])
    for rank in runs[0]:
        for got, wanted in zip(rank[kind]["seen"], alone["seen"], strict=True):
            for name in ("loss", "policy_loss", "kl", "entropy", "ratio"):
                assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
            assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)
            assert got["updates"] == 2
        for name, value in alone["end"].items():
            torch.testing.assert_close(rank[kind]["end"][name], value, atol=2e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {kind: train(Ranks(), tmp_path_factory.mktemp("one"), **KINDS[kind]) for kind in ("ddp", "lora ddp")}
