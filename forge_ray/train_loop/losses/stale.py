"""Masks for tokens that are too far from the policy. What they leave out is still counted in the denominators: the rest weighs as before.

- `versions`: tokens sampled more than so many weight updates ago (a long rollout's first calls).
- `kl`: whole sequences of negative advantage whose mean of log μ − log π per token is above a bound: DeepSeek-V3.2 (arXiv 2512.02556),
  §3.1, "off-policy sequence masking", eq. 9; TRL's `off_policy_mask_threshold`. Needs whole sequences. A sequence's advantage is its
  tokens' mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.inputs import LossInputs
from forge_ray.train_loop.losses.reduce import sequence_index, sequence_mean


def keep(config: Loss, inputs: LossInputs) -> Tensor | None:
    """1 at tokens that count and 0 at the others, (n,); None where nothing is masked."""
    settings = config.stale
    if settings.versions is None and settings.kl is None:
        return None
    kept = torch.ones_like(inputs.advantages)
    with torch.no_grad():
        if settings.versions is not None:
            if inputs.staleness is None:
                raise ValueError("loss.stale.versions needs staleness")
            kept = kept * (inputs.staleness <= settings.versions)
        if settings.kl is not None:
            index, count = sequence_index(inputs)
            far = sequence_mean(inputs.old_logprobs - inputs.logprobs, index, count) > settings.kl
            kept = kept * ~(far & (sequence_mean(inputs.advantages, index, count) < 0))
    return kept
