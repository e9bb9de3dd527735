"""The supervised start: cross entropy on demonstrations, before the first rollout. No Ray here.

The loop is the policy's (`update`): a strategy, parts of each batch, shares of a loss that add up over micro-batches and ranks. Batches are
drawn without replacement, epoch by epoch, and hold rows of somewhat similar length (shuffle, sort inside small blocks, shuffle the
batches), which saves padding. The order follows from the seed alone. Each rank takes every `world`-th row of a batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch

from forge_ray.config import Sft
from forge_ray.train_loop import forward, schedule
from forge_ray.train_loop.losses import LossInputs, Total, sft_loss
from forge_ray.train_loop.part import Part, Passes, Work
from forge_ray.train_loop.rows import Rows
from forge_ray.train_loop.strategies import Strategy
from forge_ray.train_loop.update import Diverged

BLOCK = 4
"""Batches that are sorted by length together. Length goes with the kind of task: large blocks give batches of one kind, whose gradients
contradict each other (the quickstart then needs half as many steps again)."""


def batches(rows: Sequence[forward.Row], size: int, seed: int) -> Iterator[list[forward.Row]]:
    """Endless batches of `size` rows (fewer where there are fewer rows)."""
    size = min(size, len(rows))
    epoch = 0
    while True:
        order = list(range(len(rows)))
        draw = random.Random(f"{seed}/{epoch}")
        draw.shuffle(order)
        made: list[list[int]] = []
        for start in range(0, len(order), size * BLOCK):
            block = sorted(order[start : start + size * BLOCK], key=lambda index: len(rows[index]))
            made += [block[at : at + size] for at in range(0, len(block) - size + 1, size)]
        draw.shuffle(made)
        for batch in made:
            yield [rows[index] for index in batch]
        epoch += 1


def train(
    strategy: Strategy, rows: Sequence[forward.Row], config: Sft, seed: int, *, passes: Passes, report: Callable[[int, float], None]
) -> float:
    """`config.steps` updates; calls `report(step, loss)` after each; returns the mean loss of the last tenth. Collective.

    Raises `UserError` for a model that tries would not be trained exactly for (`config.builder: tree`), and `Diverged` at a gradient that
    is not finite, before it moves a weight."""
    if config.builder == "tree":
        from forge_ray.train_loop.tree import model as tree_model

        tree_model.check(strategy.module)
    ranks, source = passes.ranks, batches(rows, config.batch_size, seed)
    last: list[float] = []
    for step in range(config.steps):
        batch = next(source)
        total = Total(sum(len(row.positions) for row in batch), len(batch))
        strategy.rate(schedule.sft_rate(config, step))
        share = _accumulate(strategy, _part(batch[ranks.rank :: ranks.world], config, passes), total, passes)
        applied = strategy.step(max_norm=config.max_grad_norm, limit=None)
        if not applied.done:
            raise Diverged(f"supervised start, update {step + 1}: the gradient's norm is {applied.norm}; lower train.sft.lr")
        value = float(ranks.sum(torch.tensor([share], dtype=torch.float64)))
        if step >= config.steps - max(1, config.steps // 10):
            last.append(value)
        report(step + 1, value)
    return sum(last) / len(last)


def _part(rows: Sequence[forward.Row], config: Sft, passes: Passes) -> Part:
    """A rank's share of a batch: rows beside each other, or one trie."""
    if config.builder == "rows":
        return Rows(rows)
    from forge_ray.train_loop.tree.forest import forest
    from forge_ray.train_loop.tree.tries import Tries
    from forge_ray.trajectories.builders import tree

    return Tries(forest(tree.of_sequences([row.ids for row in rows], [row.positions for row in rows])), passes.max_tokens)


def _accumulate(strategy: Strategy, part: Part, total: Total, passes: Passes) -> float:
    """Add the gradients of this rank's share of an update; the share."""
    shares = []

    def loss(inputs: LossInputs) -> torch.Tensor:
        value, metrics = sft_loss(inputs.logprobs, total=total, describe=inputs.describe)
        shares.append(metrics["loss"])
        return value

    def backward(share: torch.Tensor, last: bool) -> None:
        strategy.backward(share, last=last)

    part.accumulate(Work(strategy.module, passes, loss, backward, step=0, entropy=False, entropy_gradient=False))
    return sum(shares)
