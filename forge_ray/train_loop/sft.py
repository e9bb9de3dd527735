"""The supervised start: cross entropy on demonstrations, before the first rollout. No Ray here.

Batches are drawn without replacement, epoch by epoch, and hold rows of somewhat similar length (shuffle, sort inside small blocks,
shuffle the batches), which saves padding. The order follows from the seed alone. Each rank takes every `world`-th row of a batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch

from forge_ray.config import Sft
from forge_ray.train_loop import forward, schedule
from forge_ray.train_loop.losses import LossInputs, Total, sft_loss
from forge_ray.train_loop.part import Passes, Work
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.strategies.ddp import sum_gradients
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
    model: torch.nn.Module,
    rows: Sequence[forward.Row],
    config: Sft,
    seed: int,
    *,
    rank: int,
    ranks: Ranks,
    device: torch.device,
    max_tokens: int,
    report: Callable[[int, float], None],
    autocast: bool = False,
) -> float:
    """`config.steps` updates; calls `report(step, loss)` after each; returns the mean loss of the last tenth.

    Raises `UserError` for a model that tries would not be trained exactly for (`config.builder: tree`), and `Diverged` at a gradient that
    is not finite, before it moves a weight."""
    passes = Passes(device, max_tokens, ranks, lockstep=ranks.world > 1, autocast=autocast)
    if config.builder == "tree":
        from forge_ray.train_loop.tree import model as tree_model

        tree_model.check(model)
    gradients = _of_trie if config.builder == "tree" else _of_rows
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    source = batches(rows, config.batch_size, seed)
    last: list[float] = []
    for step in range(config.steps):
        batch = next(source)
        mine = batch[rank :: ranks.world]
        total = Total(sum(len(row.positions) for row in batch), len(batch))
        for group in optimizer.param_groups:
            group["lr"] = schedule.sft_rate(config, step)
        loss_sum = torch.tensor([gradients(model, mine, total, passes)], dtype=torch.float64)
        if ranks.world > 1:
            # The shares add up to the mean over the whole batch; summing the gradients keeps ranks with different numbers of
            # micro-batches in step.
            sum_gradients(parameters, ranks)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
        if not norm < float("inf"):
            raise Diverged(f"supervised start, update {step + 1}: the gradient's norm is {norm}; lower train.sft.lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = float(ranks.sum(loss_sum))
        if step >= config.steps - max(1, config.steps // 10):
            last.append(value)
        report(step + 1, value)
    return sum(last) / len(last)


def _of_rows(model: torch.nn.Module, rows: Sequence[forward.Row], total: Total, passes: Passes) -> float:
    """Add the gradients of this rank's share of an update; the share."""
    share = 0.0
    for part in forward.microbatches(rows, passes.max_tokens, passes.device):
        with passes.cast():
            logprobs, _ = forward.token_logprobs(model, part)
        loss, metrics = sft_loss(logprobs, total=total, describe=part.describe)
        loss.backward()
        share += metrics["loss"]
    return share


def _of_trie(model: torch.nn.Module, rows: Sequence[forward.Row], total: Total, passes: Passes) -> float:
    """The same, of the rows as one trie."""
    from forge_ray.train_loop.tree.forest import forest
    from forge_ray.train_loop.tree.tries import Tries
    from forge_ray.trajectories.builders import tree

    shares = []

    def loss(inputs: LossInputs) -> torch.Tensor:
        value, metrics = sft_loss(inputs.logprobs, total=total, describe=inputs.describe)
        shares.append(metrics["loss"])
        return value

    part = Tries(forest(tree.of_sequences([row.ids for row in rows], [row.positions for row in rows])), passes.max_tokens)
    part.accumulate(Work(model, passes, loss, lambda share, last: share.backward(), step=0, entropy_gradient=False))
    return sum(shares)
