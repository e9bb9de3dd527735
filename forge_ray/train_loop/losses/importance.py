"""Truncated importance sampling: what the rollout policy made too likely counts less, what it made too rare counts more, up to a cap.

    w = π_num / μ,  per token, or the product over a sequence;  `truncate`: min(w, cap);  `mask`: w where floor ≤ w ≤ cap, else 0

μ is the rollout policy as recorded; π_num is the proximal policy (decoupled from the clip's ratio π / π_num), or in a loss without a ratio
the policy itself. The weight has no gradient and multiplies the objective alone. Espeholt et al., IMPALA (arXiv 1802.01561), ρ̄ of §4.1;
for the mismatch of engine and trainer Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), TIS;
`mask` with a floor is IcePop (Ling team, arXiv 2510.18855). TRL: `vllm_importance_sampling_mode` token_truncate, token_mask,
sequence_truncate, sequence_mask; veRL: `rollout_is`, `rollout_is_threshold`. The product over a long sequence has a wide spread: see
`importance_capped`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.inputs import LossInputs
from forge_ray.train_loop.losses.kl import bounded
from forge_ray.train_loop.losses.reduce import sequence_index, sequence_sum


def weights(config: Loss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]] | None:
    """The weight of each token (n,), and per token `importance` (as applied), `importance_capped` (1: cut or masked), `importance_max`
    (before the cap; joined by its maximum). None where nothing is corrected."""
    settings = config.importance
    if settings.level == "none":
        return None
    with torch.no_grad():
        log_weight = (inputs.proximal if config.has_ratio else inputs.logprobs.detach()) - inputs.old_logprobs
        if settings.level == "sequence":
            log_weight = sequence_sum(log_weight, *sequence_index(inputs))
        weight = bounded(log_weight).exp()
        outside = weight > settings.cap
        if settings.mode == "mask":
            outside |= weight < settings.floor
            applied = torch.where(outside, 0, weight)
        else:
            applied = weight.clamp(max=settings.cap)
    return applied, {"importance": applied, "importance_capped": outside.to(weight.dtype), "importance_max": weight}
