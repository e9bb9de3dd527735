"""Weights of the last few versions, so that stale tokens can be checked against the weights that sampled them.

With a staleness bound of n, a step batch holds tokens of the current version and of the n before it. Where a batch has none of the
current one, its tokens can still be checked exactly: the trainer keeps its own weights of those versions (host memory: n times what this
rank holds of the trained weights, so adapters alone where adapters are trained, and a shard under ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightHistory:
    """The trained tensors of the newest `depth` versions before the current one."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._kept: dict[int, list[Tensor]] = {}

    def keep(self, step: int, own: Sequence[Tensor]) -> None:
        """Remember what this rank holds (`Strategy.own`) as version `step`, and forget what no batch may hold any more."""
        if self._depth:
            self._kept[step] = [value.detach().to("cpu", copy=True) for value in own]
        for old in [known for known in self._kept if known <= step - self._depth]:
            del self._kept[old]

    def versions(self) -> list[int]:
        """Versions that can be looked up, newest first."""
        return sorted(self._kept, reverse=True)

    @contextmanager
    def as_of(self, step: int, own: Sequence[Tensor]) -> Iterator[None]:
        """`own` holds the weights of version `step` inside the block, and its own again after it."""
        before = [value.detach().clone() for value in own]
        with torch.no_grad():
            for value, then in zip(own, self._kept[step], strict=True):
                value.copy_(then)
        try:
            yield
        finally:
            with torch.no_grad():
                for value, now in zip(own, before, strict=True):
                    value.copy_(now)
