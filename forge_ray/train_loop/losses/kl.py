"""Per-token estimates of KL(policy || other) from tokens that the policy sampled. d = log policy − log other, in nats.

From J. Schulman, "Approximating KL Divergence" (2020, http://joschu.net/blog/kl-approx.html). On the policy's own samples k1 and k3 have
the right mean; as a loss term the gradient of k2 is that of the KL, k3's is its first order, and k1's is the policy's score alone, whose
mean is 0: it knows nothing of the other policy. So k1 belongs into a reward (`reinforce_pp`), k2 and k3 into a loss.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log ratios are cut to ± this before exp, in nats: e^20 is far outside every clip, and nothing overflows."""


def bounded(log_ratio: Tensor) -> Tensor:
    """What `exp` may be applied to."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """d. Unbiased, of either sign."""
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """d² / 2. At least 0; its mean is the KL to second order only, its gradient's mean is the KL's own."""
    return (logprobs - other).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(−d) + d − 1. Unbiased and at least 0."""
    difference = bounded(other - logprobs)
    return difference.exp() - difference - 1


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name in `train.loss.kl_kind`."""
