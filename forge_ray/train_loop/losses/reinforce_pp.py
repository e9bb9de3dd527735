"""REINFORCE++: PPO's clipped surrogate without a critic, with the KL to the reference in the reward.

    A_t = A − kl · Σ_{i ≥ t} γ^(i − t) KL_i,   KL_i an estimate under the old policy, a number without a gradient

Hu et al., REINFORCE++ (arXiv 2501.03262), eq. 5-6 (k1, γ = 1), and its variant with the group's mean as the baseline; A is what
`train.advantage.name: reinforce_pp` makes of the rewards (normalised over the batch before the KL is taken off, where the paper normalises
after). i and t are places in the sequence's text: what lies between two trained tokens discounts, and its KL is not counted (a KL on
tool output must not reach the tokens before it). Needs whole sequences where kl is above 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.grpo import clipped
from forge_ray.train_loop.losses.inputs import LossInputs
from forge_ray.train_loop.losses.kl import KINDS, bounded
from forge_ray.train_loop.losses.reduce import sequence_index


def per_token(config: Loss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token (n,); logged: `ratio`, `clip_low`, `clip_high`, and with a KL `reward_kl`, its estimate per token."""
    advantages, metrics = inputs.advantages, {}
    if config.kl > 0:
        if inputs.reference_logprobs is None:
            raise ValueError("loss.kl needs reference_logprobs")
        index, _ = sequence_index(inputs)
        position = torch.arange(len(index), device=index.device) if inputs.position is None else inputs.position
        divergence = KINDS[config.kl_kind](inputs.proximal, inputs.reference_logprobs)
        advantages = advantages - config.kl * to_go(divergence, index, position, config.kl_discount)
        metrics = {"reward_kl": divergence}
    loss, more = clipped(config, bounded(inputs.logprobs - inputs.proximal).exp(), advantages)
    return loss, {**metrics, **more}


def to_go(values: Tensor, index: Tensor, position: Tensor, discount: float) -> Tensor:
    """Σ discount^(p_j − p_i) · values_j over the tokens j of i's sequence that do not come before it, at each token i, (n,).

    `index`: the token's sequence, `position` p: its place, both int64 (n,), in any order. Steps double, so it takes log2(n) of them.
    """
    order = position.argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    values, index, position = values[order].clone(), index[order], position[order]
    step = 1
    while step < len(values):
        same = (index[step:] == index[:-step]).to(values.dtype)
        # Of two sequences it may be negative, and a discount to its power infinite, which no factor of 0 takes away.
        between = (position[step:] - position[:-step]).clamp(min=0).to(values.dtype)
        values = torch.cat([values[:-step] + same * discount**between * values[step:], values[-step:]])
        step *= 2
    return torch.empty_like(values).index_copy(0, order, values)
