"""From one value per token to the step's loss: a sum, divided by one number that was counted over all parts of the step.

So the parts add up, in value, metrics and gradient, to the loss of the whole. Never a mean of means.

| `train.loss.reduction` | Σ over tokens of | divided by |
|---|---|---|
| `token_mean` | value | trained tokens of the step |
| `trajectory_mean` | value / trained tokens of its trajectory | trajectories of the step |
| `sequence_mean` | value / trained tokens of its sequence | sequences of the step |
| `trajectory_sum` | value | trajectories of the step |
| `constant` | value | `train.loss.constant` |
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.inputs import LossInputs, Total


def reduce(values: Tensor, inputs: LossInputs, *, config: Loss, total: Total) -> Tensor:
    """Scalar share of the step's loss, of `values` (n,) at the trained tokens of one part (`inputs` without a mask)."""
    if config.reduction == "trajectory_mean":
        if inputs.trajectory_tokens is None:
            raise ValueError("reduction trajectory_mean needs trajectory_tokens")
        values = values / inputs.trajectory_tokens.clamp(min=1)
    elif config.reduction == "sequence_mean":
        values = values / sequence_tokens(inputs).clamp(min=1)
    return values.sum() / denominator(config, total)


def denominator(config: Loss, total: Total) -> float:
    """The one number that every part's sum is divided by. 1 where the step trains nothing, whose sum is 0."""
    if config.reduction == "constant":
        if config.constant is None:
            raise ValueError("reduction constant needs loss.constant")
        return config.constant
    if config.reduction == "token_mean":
        return float(max(1, total.tokens))
    if config.reduction == "sequence_mean":
        if total.tokens and not total.sequences:
            raise ValueError("reduction sequence_mean needs the number of sequences in its total")
        return float(max(1, total.sequences))
    return float(max(1, total.trajectories))


def sequence_index(inputs: LossInputs) -> tuple[Tensor, int]:
    """Which of 0 … m − 1 each token's sequence is, (n,), and m."""
    if inputs.sequence is None:
        raise ValueError("this loss needs the sequence of each token")
    known, index = inputs.sequence.unique(return_inverse=True)
    return index, len(known)


def sequence_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of `values` over each sequence, at each of its tokens, (n,)."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)[index]


def sequence_mean(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Mean of `values` over each sequence, at each of its tokens, (n,)."""
    return sequence_sum(values, index, count) / sequence_sum(torch.ones_like(values), index, count)


def sequence_tokens(inputs: LossInputs) -> Tensor:
    """Trained tokens of each token's sequence, (n,)."""
    if inputs.sequence_tokens is not None:
        return inputs.sequence_tokens
    index, count = sequence_index(inputs)
    return sequence_sum(torch.ones_like(inputs.logprobs), index, count)
