"""Sums over the ranks of a data-parallel group; on one rank everything is itself."""

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


def of_process(device: torch.device) -> Ranks:
    """This process's torch.distributed group, if there is one."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()

    def total(values: Tensor) -> Tensor:
        moved = values.to(device, copy=True)
        dist.all_reduce(moved)
        return moved.to(values.device)

    return Ranks(dist.get_world_size(), total)
