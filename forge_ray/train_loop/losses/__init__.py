"""The losses: pure functions of tensors, one file each; `policy_loss` puts one together by its name in `train.loss`.

Invariants:
- **A mask hides everything.** What is masked is taken out before any arithmetic, so that a NaN there reaches no value, no metric and no
  gradient. A NaN or an infinity at a trained position raises `NotFinite`, which names the input.
- **Sums, one denominator.** A loss is a sum over trained tokens divided by a number that the caller counted over the whole optimizer
  step: every micro-batch, every rank. So the parts add up, in value, metrics and gradient, to the loss of the whole. Never a mean of means.
  (DDP averages gradients over the ranks: multiply the loss by the number of ranks there, or sum the gradients.)
- **Whole sequences where they are needed.** A loss that looks at all tokens of a sequence (one call) at once has
  `config.needs_whole_sequences`; then every part must hold sequences whole. Which part holds which does not matter.
"""

from __future__ import annotations

from forge_ray.train_loop.losses.inputs import LossInputs, NotFinite, Total
from forge_ray.train_loop.losses.policy import MAXIMA, OBJECTIVES, join, policy_loss
from forge_ray.train_loop.losses.reduce import denominator, reduce
from forge_ray.train_loop.losses.sft import sft_loss

__all__ = ["MAXIMA", "OBJECTIVES", "LossInputs", "NotFinite", "Total", "denominator", "join", "policy_loss", "reduce", "sft_loss"]
