"""Supervised loss: cross entropy of the demonstrations' trained tokens, by the rules of `losses` (masks, one denominator)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_ray.train_loop.losses import Total, masked


def sft_loss(
    logprobs: Tensor, *, total: Total, mask: Tensor | None = None, describe: Callable[[int], str] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """This part's share of -mean log p over the `total.tokens` trained tokens of the step (nats), and `{"loss"}`."""
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    loss = -masked("logprobs", logprobs, mask, describe).sum() / max(1, total.tokens)
    return loss, {"loss": float(loss.detach())}
