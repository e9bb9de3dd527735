"""The policy loss: one objective by its name, and what is added to each of them.

    loss = Σ_tokens weight · keep · ( importance · objective + kl · KL(π || reference) + teacher's term − entropy · H ) / denominator

`keep` is 0 or 1 (`stale`), `importance` a number without a gradient; the sum and its denominator are `reduce`'s. In `reinforce_pp` the KL
is in the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses import (
    cispo,
    dapo,
    distillation,
    dr_grpo,
    grpo,
    gspo,
    importance,
    reinforce_pp,
    rloo,
    sft,
    stale,
)
from forge_ray.train_loop.losses.inputs import LossInputs, Total
from forge_ray.train_loop.losses.kl import KINDS, k1, k3
from forge_ray.train_loop.losses.reduce import reduce

Objective = Callable[[Loss, LossInputs], tuple[Tensor, dict[str, Tensor]]]
OBJECTIVES: dict[str, Objective] = {
    "grpo": grpo.per_token,
    "dr_grpo": dr_grpo.per_token,
    "dapo": dapo.per_token,
    "gspo": gspo.per_token,
    "cispo": cispo.per_token,
    "rloo": rloo.per_token,
    "reinforce_pp": reinforce_pp.per_token,
    "distillation": distillation.per_token,
    "sft": sft.per_token,
}
"""By the name in `train.loss.name`: loss per token (n,), and what to log per token. The inputs have no mask."""

MAXIMA = frozenset({"importance_max"})
"""Metrics whose parts are joined by their maximum; all others by their sum."""


def policy_loss(config: Loss, inputs: LossInputs, total: Total) -> tuple[Tensor, dict[str, float]]:
    """This part's share of the step's loss (a scalar with a gradient), and of its metrics: join them with `join`.

    Metrics are sums over this part's trained tokens divided by `total.tokens`, so that the sum over all parts is the step's mean per
    token (but for `MAXIMA`); `loss` adds up to the loss itself. Their names follow from `config` and from which inputs there are, not from
    the tokens. Raises `NotFinite` for a trained position, `ValueError` for an input that `config` needs and that is not there.
    """
    inputs = distillation.advised(config, inputs.trained_only())
    objective, metrics = OBJECTIVES[config.name](config, inputs)
    if (corrected := importance.weights(config, inputs)) is not None:
        objective, metrics = corrected[0] * objective, {**metrics, **corrected[1]}
    weights = inputs.weights
    if (kept := stale.keep(config, inputs)) is not None:
        weights, metrics["stale_masked"] = weights * kept, 1 - kept
    metrics["policy_loss"] = weights * objective
    values = objective
    if (kl := _reference_kl(config, inputs)) is not None:
        values, metrics["kl"] = values + config.kl * kl, kl
    if (term := distillation.term(config, inputs)) is not None:
        values = values + term
    if config.entropy > 0:
        if inputs.entropy is None:
            raise ValueError("loss.entropy needs entropy")
        values = values - config.entropy * inputs.entropy
    loss = reduce(weights * values, inputs, config=config, total=total)
    shares = {name: _share(name, value, total) for name, value in {**metrics, **_logged(inputs)}.items()}
    return loss, {"loss": float(loss.detach()), **shares}


def join(into: dict[str, float], part: Mapping[str, float]) -> None:
    """Add one part's metrics to what is known."""
    for name, value in part.items():
        into[name] = max(into.get(name, value), value) if name in MAXIMA else into.get(name, 0.0) + value


def _reference_kl(config: Loss, inputs: LossInputs) -> Tensor | None:
    if config.kl == 0 or config.name == "reinforce_pp":
        return None
    if inputs.reference_logprobs is None:
        raise ValueError("loss.kl needs reference_logprobs")
    return KINDS[config.kl_kind](inputs.logprobs, inputs.reference_logprobs)


@torch.no_grad()
def _logged(inputs: LossInputs) -> dict[str, Tensor]:
    """What is logged of every loss, per token (n,)."""
    made = {
        "old_kl": k3(inputs.logprobs, inputs.old_logprobs),
        "logprob_difference": (inputs.logprobs - inputs.old_logprobs).abs(),
    }
    if inputs.entropy is not None:
        made["entropy"] = inputs.entropy
    if inputs.teacher_logprobs is not None:
        made["teacher_kl"] = k1(inputs.logprobs, inputs.teacher_logprobs)
    if inputs.proximal_logprobs is not None:
        made["proximal_kl"] = k3(inputs.proximal_logprobs, inputs.old_logprobs)
    return made


def _share(name: str, values: Tensor, total: Total) -> float:
    values = values.detach()
    if name in MAXIMA:
        return float(values.max()) if len(values) else 0.0
    return float(values.sum()) / max(1, total.tokens)
