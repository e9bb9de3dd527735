"""Supervised loss: cross entropy of the trained tokens, −log π per token. As a policy loss only tokens of positive advantage count.

The latter is rejection-sampling fine-tuning on the group's better rollouts: Dong et al., RAFT (arXiv 2304.06767), algorithm 1, with the
better-than-baseline half in place of the best one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.inputs import LossInputs, Total


def per_token(config: Loss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """−log π where the advantage is above 0, else 0, (n,); logged: `chosen`, 1 where it counts."""
    chosen = (inputs.advantages > 0).to(inputs.logprobs.dtype)
    return -chosen * inputs.logprobs, {"chosen": chosen}


def sft_loss(
    logprobs: Tensor, *, total: Total, mask: Tensor | None = None, describe: Callable[[int], str] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """This part's share of −mean log π over the `total.tokens` trained tokens of the step (nats), and `{"loss"}`."""
    unused = torch.zeros_like(logprobs)
    inputs = LossInputs(logprobs, unused, unused, unused, mask=mask, describe=describe).trained_only()
    loss = -inputs.logprobs.sum() / max(1, total.tokens)
    return loss, {"loss": float(loss.detach())}
