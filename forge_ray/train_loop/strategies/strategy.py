"""How the ranks of a worker group share a model and one optimizer step.

The learner computes shares of a loss: a sum over trained tokens divided by one number that was counted over all micro-batches and ranks
(`losses`). So gradients are *summed* over micro-batches and ranks, never averaged, and a strategy's only business is where weights,
gradients and optimizer state lie and when the ranks meet. Invariants:

- An update is all or nothing, and the same on every rank: `step` applies it to every weight, or leaves weights and moments as they were.
- Between two updates every rank sees the same weights through `module`.
- What is saved is enough to go on bit for bit, on as many ranks as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from forge_ray.config import Optimizer

AdamWType = TypeVar("AdamWType", bound=torch.optim.AdamW)


class Applied(NamedTuple):
    """What became of one update."""

    norm: float
    """Norm of the whole gradient before clipping; infinite or NaN where it was not finite."""
    done: bool
    """False: the update was left out, and weights and moments are as before."""


class Strategy(Protocol):
    """See the module. `name` stands in checkpoints: one strategy's optimizer state is of no use to another."""

    name: str
    lockstep: bool
    """Every rank must make the same number of forward and of backward passes (weights or gradients meet in them): whoever has fewer
    makes up the difference with empty micro-batches."""

    @property
    def model(self) -> torch.nn.Module:
        """The Hugging Face model itself (or peft around it): its config, its head, its parameters' names."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """What forward passes call."""
        ...

    def rate(self, value: float) -> None:
        """Set the learning rate."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar share. `last`: no further backward of this update will come on this rank."""
        ...

    def step(self, *, max_norm: float, limit: float | None) -> Applied:
        """Sum the gradients over the ranks, clip their norm to `max_norm`, update, clear them. An update whose norm is not finite, or
        above `limit`, is left out. Collective."""
        ...

    def frozen(self, model: torch.nn.Module) -> torch.nn.Module:
        """`model` (a reference policy) placed as the trained one is, without gradients; forward passes call the result."""
        ...

    def own(self) -> list[Tensor]:
        """The tensors of this process that hold the trained weights: written together on all ranks they change what `module` computes."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole values of the trained parameters, one after the other (a value is only good until the next). Collective."""
        ...

    def save(self, directory: Path) -> None:
        """Write the optimizer's state below `directory`, where every rank writes its own part. Collective."""
        ...

    def restore(self, directory: Path) -> None:
        """Read it back (`map_location` is the ranks' own). Collective; raises whatever reading raises."""
        ...

    def close(self) -> None:
        """It is not used any more, and another may take its place in this process."""
        ...


def adamw(parameters: list[torch.nn.Parameter], settings: Optimizer, kind: type[AdamWType]) -> AdamWType:
    """AdamW (of this class) by the rules of `train.optimizer`."""
    return kind(parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)


def rules(optimizer: torch.optim.Optimizer, settings: Optimizer) -> None:
    """The rules of `train.optimizer` again: a state that was read brought those that it was written under. The rate is set at each step."""
    for group in optimizer.param_groups:
        group["betas"], group["weight_decay"] = settings.betas, settings.weight_decay
