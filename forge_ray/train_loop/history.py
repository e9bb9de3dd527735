"""Weights of the last few versions, so that stale tokens can be checked against the weights that sampled them.

With a staleness bound of n, a step batch holds tokens of the current version and of the n before it. Where a batch has none of the
current one, its tokens can still be checked exactly: the trainer keeps its own weights of those versions (host memory: n times the model).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightHistory:
    """The parameters of the newest `depth` versions before the current one."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._kept: dict[int, dict[str, Tensor]] = {}

    def keep(self, step: int, model: torch.nn.Module) -> None:
        """Remember the model's parameters as version `step`, and forget what no batch may hold any more."""
        if self._depth:
            self._kept[step] = {name: value.detach().to("cpu", copy=True) for name, value in model.named_parameters()}
        for old in [known for known in self._kept if known <= step - self._depth]:
            del self._kept[old]

    def versions(self) -> list[int]:
        """Versions that can be looked up, newest first."""
        return sorted(self._kept, reverse=True)

    @contextmanager
    def as_of(self, step: int, model: torch.nn.Module) -> Iterator[None]:
        """The model holds the weights of version `step` inside the block, and its own again after it."""
        own = {name: value.detach().clone() for name, value in model.named_parameters()}
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(self._kept[step][name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in model.named_parameters():
                    value.copy_(own[name])
