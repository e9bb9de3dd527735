"""The policy loss: one objective by its name, and what is added to each of them.

    loss = Σ_tokens weight · keep · ( importance · objective + kl · KL(π || reference) − entropy · H ) / denominator

`keep` is 0 or 1 (`stale`), `importance` a number without a gradient; the sum and its denominator are `reduce`'s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses import grpo
from forge_ray.train_loop.losses.inputs import LossInputs, Total
from forge_ray.train_loop.losses.kl import KINDS, k3
from forge_ray.train_loop.losses.reduce import reduce

Objective = Callable[[Loss, LossInputs], tuple[Tensor, dict[str, Tensor]]]
OBJECTIVES: dict[str, Objective] = {
    "grpo": grpo.per_token,
}
"""By the name in `train.loss.name`: loss per token (n,), and what to log per token. The inputs have no mask."""

MAXIMA = frozenset({"importance_max"})
"""Metrics whose parts are joined by their maximum; all others by their sum."""


def policy_loss(config: Loss, inputs: LossInputs, total: Total) -> tuple[Tensor, dict[str, float]]:
    """This part's share of the step's loss (a scalar with a gradient), and of its metrics: join them with `join`.

    Metrics are sums over this part's trained tokens divided by `total.tokens`, so that the sum over all parts is the step's mean per
    token; `loss` adds up to the loss itself. Their names follow from `config` and from which inputs there are, not from the tokens.
    Raises `NotFinite` for a trained position, `ValueError` for an input that `config` needs and that is not there.
    """
    inputs = inputs.trained_only()
    objective, metrics = OBJECTIVES[config.name](config, inputs)
    metrics = {"policy_loss": inputs.weights * objective, **metrics}
    values = objective
    if config.kl > 0:
        if inputs.reference_logprobs is None:
            raise ValueError("loss.kl needs reference_logprobs")
        divergence = KINDS[config.kl_kind](inputs.logprobs, inputs.reference_logprobs)
        values = values + config.kl * divergence
        metrics["kl"] = divergence
    if inputs.entropy is not None:
        metrics["entropy"] = inputs.entropy
    if config.entropy > 0:
        if inputs.entropy is None:
            raise ValueError("loss.entropy needs entropy")
        values = values - config.entropy * inputs.entropy
    with torch.no_grad():
        metrics["old_kl"] = k3(inputs.logprobs, inputs.old_logprobs)
        metrics["logprob_difference"] = (inputs.logprobs - inputs.old_logprobs).abs()
    loss = reduce(inputs.weights * values, inputs, config=config, total=total)
    shares = {name: float(value.detach().sum()) / max(1, total.tokens) for name, value in metrics.items()}
    return loss, {"loss": float(loss.detach()), **shares}


def join(into: dict[str, float], part: dict[str, float]) -> None:
    """Add one part's metrics to what is known."""
    for name, value in part.items():
        into[name] = max(into.get(name, value), value) if name in MAXIMA else into.get(name, 0.0) + value
