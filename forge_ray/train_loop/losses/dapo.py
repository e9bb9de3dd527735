"""DAPO: GRPO with a wider upper bound ("clip-higher"), a mean over all tokens of the step, and no KL.

The surrogate is GRPO's (`grpo`) with ε_low = 0.2, ε_high = 0.28; the sum is divided by Σ|o_i| (`reduction: token_mean`). Yu et al., DAPO
(arXiv 2503.14476), eq. 8; §3.1, §3.3. Its dynamic sampling is
`train.dynamic_sampling`, its overlong penalty a reward: neither is part of the loss.
"""

from __future__ import annotations

from forge_ray.train_loop.losses import grpo

per_token = grpo.per_token
