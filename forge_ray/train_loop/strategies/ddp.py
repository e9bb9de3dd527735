"""Plain data parallelism: every rank holds everything, gradients are summed once per update. Also what a single process does.

Not torch's DistributedDataParallel: its hooks want one backward per forward, in order, the same number on every rank, and every weight
reached. Micro-batches that differ in number, adapters, and trees whose pieces run backward while the trunk still waits break that;
one sum in flat buckets after the last backward breaks nothing, costs one all-reduce per update, and gives up only its overlap with the
last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from forge_ray.config import Optimizer
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.strategies.strategy import Applied, adamw, rules

BUCKET = 16_000_000
"""Gradient values that travel together."""


class Replicated:
    """A `Strategy`."""

    name = "ddp"
    lockstep = False

    def __init__(self, model: torch.nn.Module, settings: Optimizer, ranks: Ranks, device: torch.device) -> None:
        self._model, self._ranks = model.to(device), ranks
        self._device, self._settings = device, settings
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = adamw(self._parameters, settings, torch.optim.AdamW)

    @property
    def model(self) -> torch.nn.Module:
        return self._model

    @property
    def module(self) -> torch.nn.Module:
        return self._model

    def rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, *, max_norm: float, limit: float | None) -> Applied:
        if self._ranks.world > 1:
            sum_gradients(self._parameters, self._ranks)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, max_norm))
        done = norm < float("inf") and (limit is None or norm <= limit)
        if done:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Applied(norm, done)

    def frozen(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.to(self._device).eval().requires_grad_(False)

    def own(self) -> list[Tensor]:
        return [parameter.data for parameter in self._parameters]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.detach()

    def save(self, directory: Path) -> None:
        # The ranks' states are equal: one file.
        if self._ranks.rank == 0:
            torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")

    def restore(self, directory: Path) -> None:
        self.optimizer.load_state_dict(torch.load(directory / "optimizer.pt", map_location="cpu", weights_only=True))
        rules(self.optimizer, self._settings)

    def close(self) -> None:
        pass


def sum_gradients(parameters: list[torch.nn.Parameter], ranks: Ranks) -> None:
    """Every gradient becomes its sum over the ranks. A rank that has none of a parameter adds 0. Collective."""
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in [*parameters, None]:
        if bucket and (parameter is None or size + parameter.numel() > BUCKET or parameter.dtype != bucket[0].dtype):
            _sum_bucket(bucket, ranks)
            bucket, size = [], 0
        if parameter is not None:
            bucket.append(parameter)
            size += parameter.numel()


def _sum_bucket(parameters: list[torch.nn.Parameter], ranks: Ranks) -> None:
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    summed = ranks.sum(flat)
    for parameter, part in zip(parameters, summed.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()
