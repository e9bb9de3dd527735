"""`train.optimizer` and `train.sft`: AdamW, and the supervised start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forge_ray.config.values import Beta, Count, NonNegative, Positive, Section, Source


class Sft(Section):
    """Supervised start: cross entropy on the demonstrations' assistant tokens."""

    demonstrations: Source
    """A Parquet file (or a function that makes `demonstrations.parquet`) with `ids` and `mask`, lists of equal length. `builtin:teacher`
    makes it of a teacher's recorded rollouts, see docs/upstreams.md."""
    steps: Count = 400
    """Optimizer updates."""
    batch_size: Count = 32
    """Demonstrations per update."""
    builder: Literal["rows", "tree"] = "rows"
    """`tree` puts the demonstrations of an update into one trie: what they begin with alike is computed once, with the same gradients."""
    lr: Positive = 3e-3
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Updates of linear rise."""
    decay_fraction: Annotated[NonNegative, Field(le=1)] = 0.3
    """Share of the steps, at the end, over which the rate falls linearly to 0."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping."""

    @property
    def optimizer(self) -> Optimizer:
        """Its AdamW, as the policy's is written; the rate is set at each update."""
        return Optimizer(lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)


class Optimizer(Section):
    lr: Positive = 1e-6
    """AdamW's learning rate at the first step."""
    lr_end: NonNegative | None = None
    """Rate at the last step, reached linearly; None = constant."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping."""
    skip_grad_norm: Positive | None = None
    """An update whose gradient norm, before clipping, is above this is left out and counted; null = only one that is not finite."""
    max_skips: Annotated[int, Field(ge=0)] = 5
    """Updates in a row that may be left out; one more stops the run."""
    epochs: Count = 1
    """Passes over each step batch."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    microbatch_tokens: Count = 16384
    """Padded tokens of one forward pass."""
