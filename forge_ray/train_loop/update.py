"""One step of the learner: optimizer updates on one step batch. No Ray here, so that it can be tested and read by itself.

A step is `epochs` passes over the batch in `minibatches` optimizer updates each. Every update's loss is a sum over its parts and the ranks,
with one denominator that was counted over all of them first. What may happen to an update:

- nothing of it is trained (every group of the batch is degenerate): no optimizer step; the version advances all the same, with the same
  weights, so that rollouts go on;
- its gradient is not finite (the policy's own log-probabilities are NaN, say) or longer than `skip_grad_norm`: it is left out, on every
  rank, and weights and moments stay as they are. More than `max_skips` in a row stop the run (`Diverged`);
- something recorded is NaN: the run stops by name (`NotFinite`), before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge_ray.config import Config, Optimizer
from forge_ray.errors import ForgeRayError
from forge_ray.train_loop import agreement, schedule
from forge_ray.train_loop.history import WeightHistory
from forge_ray.train_loop.losses import MAXIMA, LossInputs, NotFinite, Total, join, policy_loss
from forge_ray.train_loop.part import Part, Passes, Work
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.strategies.strategy import Applied, Strategy

OWN = frozenset({"logprobs", "entropy", "proximal_logprobs"})
"""Inputs of a loss that the policy under training computes; the others are recorded, or another policy's."""

Scorer = Callable[[Part], np.ndarray]
"""Log-probabilities, float32 (n,), of a part's tokens under some policy that is not trained."""


class Diverged(ForgeRayError):
    """Too many updates in a row had to be left out."""


@dataclass
class Guard:
    """Counts updates that were left out; lives as long as the worker."""

    settings: Optimizer
    skipped: int = 0
    """In a row."""

    def saw(self, applied: Applied, step: int) -> None:
        """Raises `Diverged` where this update is one too many."""
        self.skipped = 0 if applied.done else self.skipped + 1
        if self.skipped > self.settings.max_skips:
            limit = self.settings.skip_grad_norm
            raise Diverged(
                f"step {step}: {self.skipped} updates in a row were left out (train.optimizer.max_skips = {self.settings.max_skips}); the "
                f"last gradient's norm is {applied.norm:.3g}{'' if limit is None else f', train.optimizer.skip_grad_norm is {limit:g}'}. "
                "Lower train.optimizer.lr; the newest checkpoint holds the weights before"
            )


def train_step(
    strategy: Strategy,
    part: Part,
    config: Config,
    step: int,
    *,
    others: Mapping[str, Scorer],
    history: WeightHistory,
    guard: Guard,
    passes: Passes,
    unknown: Container[int] = (),
) -> dict[str, float | None]:
    """Train the batch of step `step` (from 0: the version of the weights that the strategy holds); returns the step's metrics.

    `others`: by the field of `LossInputs` that each fills, the policies that the loss compares with. `unknown`: versions that
    `agreement.check` leaves out. Metrics are means over the updates
    that were made, but for those of `agreement.check`, which comes before the first. Raises `LogprobMismatch` and `NotFinite` before
    anything is changed by the batch that shows it.
    """
    train = config.train
    rate = schedule.policy_rate(train.optimizer, step, train.steps)
    strategy.rate(rate)
    hint = agreement.remedy(config.engine_dtype, train.precision)
    agreed = agreement.check(strategy, part, step, bound=train.logprob_bound, history=history, passes=passes, hint=hint, unknown=unknown)
    history.keep(step, strategy.own())
    for name, score in others.items():
        part = part.with_scores(name, score(part))
    if train.loss.old_policy == "recomputed":
        part = part.with_scores("proximal_logprobs", part.score(strategy.module, passes))
    sums: dict[str, float] = {}
    norms: list[float] = []
    updates = skipped = 0
    for epoch in range(train.optimizer.epochs):
        for minibatch in part.minibatches(train.optimizer.minibatches, seed=f"{config.seed}/{step}/{epoch}"):
            total = Total(*(int(count) for count in passes.ranks.sum(torch.tensor(minibatch.total(), dtype=torch.float64))))
            if total.tokens == 0:
                continue
            metrics = _accumulate(strategy, minibatch, total, config, step, passes)
            applied = strategy.step(max_norm=train.optimizer.max_grad_norm, limit=train.optimizer.skip_grad_norm)
            guard.saw(applied, step)
            if not applied.done:
                skipped += 1
                continue
            updates += 1
            norms.append(applied.norm)
            join(sums, metrics)
    mean = {name: value if name in MAXIMA else value / max(1, updates) for name, value in sums.items()}
    return {
        **mean,
        **({"clip_fraction": mean["clip_low"] + mean["clip_high"]} if "clip_low" in mean else {}),
        **({"grad_norm": sum(norms) / len(norms)} if norms else {}),
        "lr": rate,
        "updates": updates,
        "updates_skipped": skipped,
        **agreed,
    }


def _accumulate(strategy: Strategy, part: Part, total: Total, config: Config, step: int, passes: Passes) -> dict[str, float]:
    """Gradients of one update, over the part; returns its metrics, of all ranks."""
    shares: dict[str, float] = {}

    def loss(inputs: LossInputs) -> Tensor:
        try:
            share, metrics = policy_loss(config.train.loss, inputs, total)
        except NotFinite as error:
            if error.name not in OWN:
                raise
            # Not a reason to stop at once: the gradient is made not finite on every rank, and the update is left out.
            return inputs.logprobs.sum() * float("nan")
        join(shares, metrics)
        return share

    def backward(share: Tensor, last: bool) -> None:
        strategy.backward(share, last=last)

    settings = config.train.loss
    part.accumulate(
        Work(
            strategy.module, passes, loss, backward, step,
            whole_sequences=settings.needs_whole_sequences, entropy_gradient=settings.entropy > 0,
        )
    )  # fmt: skip
    return _over_ranks(shares, passes.ranks)


def _over_ranks(metrics: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """One rank's metrics joined with those of the others. A rank whose every share was NaN has none."""
    if ranks.most(-int(bool(metrics))) == 0:
        return {}
    names = sorted(metrics)
    values = torch.tensor([metrics[name] for name in names], dtype=torch.float64)
    return {
        name: most if name in MAXIMA else whole
        for name, whole, most in zip(names, ranks.sum(values).tolist(), ranks.max(values).tolist(), strict=True)
    }
