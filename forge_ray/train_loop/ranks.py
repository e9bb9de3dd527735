"""Sums and maxima over the ranks of a data-parallel group; on one rank everything is itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Ranks:
    """The group as the learner's pure parts see it."""

    world: int = 1
    sum: Callable[[Tensor], Tensor] = field(default=lambda values: values)
    """Sum of a tensor over the ranks, on the device that it came from."""
    max: Callable[[Tensor], Tensor] = field(default=lambda values: values)
    """Largest of the ranks' values, place by place, likewise."""
    rank: int = 0

    def most(self, count: int) -> int:
        """The largest of the ranks' numbers."""
        return int(self.max(torch.tensor(count)))

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.most(0)  # a collective that every backend has, on the device that the backend talks from


def of_process(device: torch.device) -> Ranks:
    """This process's torch.distributed group, if there is one."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()

    def over(operation: dist.ReduceOp.RedOpType) -> Callable[[Tensor], Tensor]:
        def reduced(values: Tensor) -> Tensor:
            moved = values.to(device, copy=True)
            dist.all_reduce(moved, op=operation)
            return moved.to(values.device)

        return reduced

    return Ranks(dist.get_world_size(), over(dist.ReduceOp.SUM), over(dist.ReduceOp.MAX), dist.get_rank())
