"""On-policy distillation: the reverse KL to a teacher, on tokens that the policy sampled and the teacher rated.

KL(π || T) = E_{y~π} Σ_t (log π(y_t) − log T(y_t)). Two forms:

- `advantage`: c · (log T − log π_old) is a reward of each token by itself, without discount; with the ratio to the old policy as the
  objective, −r·A. So it is published by Lu et al. (Thinking Machines Lab, "On-Policy Distillation", 2025,
  https://thinkingmachines.ai/blog/on-policy-distillation): "the per-token reverse KL as the advantage", importance-sampling loss.
- `loss`: c · k2 or k3 of (π, T) is a term of the loss with a gradient of its own; k2's is (log π − log T)·∇log π, the single-step term of
  the reverse KL's gradient in Gu et al., MiniLLM (arXiv 2306.08543), eq. 3-4.

With `name: distillation` that is all and rewards play no part; under any other name it is added to what the rewards say. Agarwal et al.,
GKD (arXiv 2306.13649) is the same idea with whole distributions; here one number per token of the teacher's is enough.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses.inputs import LossInputs
from forge_ray.train_loop.losses.kl import KINDS, bounded


def per_token(config: Loss, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token (n,) without rewards: −r·A in the form `advantage`, where `advised` has put the teacher's numbers; else 0."""
    if config.has_ratio:
        ratio = bounded(inputs.logprobs - inputs.proximal).exp()
        return -ratio * inputs.advantages, {"ratio": ratio.detach()}
    return inputs.logprobs * 0, {}


def advised(config: Loss, inputs: LossInputs) -> LossInputs:
    """The inputs with the advantages that the objective takes: the rewards', the teacher's, or both."""
    settings = config.distillation
    if settings is None:
        return inputs
    advantages = inputs.advantages * 0 if config.name == "distillation" else inputs.advantages
    if settings.form == "advantage":
        advantages = advantages + settings.coefficient * (teacher(inputs) - inputs.proximal)
    return replace(inputs, advantages=advantages)


def term(config: Loss, inputs: LossInputs) -> Tensor | None:
    """What the form `loss` adds to each token's loss, (n,)."""
    settings = config.distillation
    if settings is None or settings.form != "loss":
        return None
    return settings.coefficient * KINDS[settings.kind](inputs.logprobs, teacher(inputs))


def teacher(inputs: LossInputs) -> Tensor:
    """The teacher's log-probabilities, which must be there."""
    if inputs.teacher_logprobs is None:
        raise ValueError("loss.distillation needs teacher_logprobs")
    return inputs.teacher_logprobs
