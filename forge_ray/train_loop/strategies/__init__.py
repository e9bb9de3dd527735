"""Where weights, gradients and optimizer state lie: `train.strategy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_ray.train_loop.strategies.strategy import Applied, Strategy

if TYPE_CHECKING:
    import torch

    from forge_ray.config import Optimizer, Train
    from forge_ray.train_loop.ranks import Ranks

__all__ = ["Applied", "Strategy", "make"]


def make(train: Train, model: torch.nn.Module, ranks: Ranks, device: torch.device, optimizer: Optimizer | None = None) -> Strategy:
    """The strategy of `train` around `model`, whose parameters that require gradients are trained, by the rules of `optimizer`
    (`train.optimizer`, where nothing is given). Collective."""
    rules = optimizer or train.optimizer
    if train.strategy == "deepspeed":
        from forge_ray.train_loop.strategies.deepspeed import Sharded

        return Sharded(model, rules, train.deepspeed, ranks, device, bfloat16=train.precision == "bfloat16")
    from forge_ray.train_loop.strategies.ddp import Replicated

    return Replicated(model, rules, ranks, device)
