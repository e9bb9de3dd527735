"""`train.loss`: the policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forge_ray.config.values import NonNegative, Positive, Section, Share, Source

OWN: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.28, "reduction": "token_mean"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "reduction": "constant"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "reduction": "token_mean"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "reduction": "token_mean"},
    "rloo": {"reduction": "trajectory_sum"},
    "reinforce_pp": {"clip_low": 0.2, "clip_high": 0.2, "reduction": "token_mean", "kl_kind": "k1"},
    "distillation": {"reduction": "token_mean"},
    "sft": {"reduction": "token_mean"},
}
"""What a loss uses where the config says nothing: as published."""
RATIO = frozenset({"grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp"})
"""Losses whose objective is a ratio to the old policy."""


class Importance(Section):
    """Truncated importance sampling: what the rollout's own log-probabilities say about each token."""

    level: Literal["none", "token", "sequence"] = "none"
    """One weight per token, or one per sequence (the product over a call's tokens): proximal policy / rollout policy, or, in a loss
    without a ratio, policy / rollout policy."""
    mode: Literal["truncate", "mask"] = "truncate"
    """`truncate`: weights above `cap` become `cap`; `mask`: tokens (or sequences) whose weight is outside floor … cap do not count."""
    cap: Positive = 2.0
    """Largest weight."""
    floor: NonNegative = 0.0
    """Smallest weight of `mode: mask`."""


class Stale(Section):
    """Tokens that are too far from the policy are left out of the loss; the denominators still count them."""

    versions: Annotated[int, Field(ge=0)] | None = None
    """Leave out tokens that were sampled more than so many weight updates ago."""
    kl: Positive | None = None
    """Leave out sequences of negative advantage whose mean (rollout − policy log-probability) per token, in nats, is above this."""


class Distillation(Section):
    """On-policy distillation: the teacher rates the tokens that the policy sampled."""

    teacher: Source | None = None
    """A Hugging Face model directory with the policy's vocabulary. The train workers run it once over each step batch."""
    upstream: str | None = None
    """In its place: a model name that falls under `proxy.upstreams`, served by vLLM with the policy's tokenizer. Each group is rated when
    it is complete, and the ratings are recorded."""
    coefficient: Positive = 1.0
    """Factor of the reverse KL."""
    form: Literal["advantage", "loss"] = "advantage"
    """`advantage`: coefficient × (teacher − old log-probability) is added to each token's advantage; `loss`: coefficient × `kind` of
    (policy, teacher) is added to each token's loss."""
    kind: Literal["k2", "k3"] = "k2"
    """Estimate of the reverse KL in the form `loss`."""

    @model_validator(mode="after")
    def _one_teacher(self) -> Distillation:
        if (self.teacher is None) == (self.upstream is None):
            raise ValueError("a teacher is a model directory (teacher) or a served model (upstream): give one of them")
        return self


class Loss(Section):
    """The policy loss, see [algorithms.md](algorithms.md). Where a field is not given it is as the loss was published."""

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "distillation", "sft"] = "grpo"
    """Which one."""
    clip_low: Annotated[NonNegative, Field(le=1)] = 0.2
    """The ratio is clipped at 1 − clip_low; 1: not at all."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped at 1 + clip_high."""
    clip_dual: Annotated[Positive, Field(gt=1)] | None = None
    """Dual clip: the loss of a token of negative advantage is at most so many times its advantage; null = unbounded."""
    old_policy: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the ratio: the log-probabilities recorded at sampling, or the trainer's own before the step's first update (one more
    forward pass)."""
    importance: Importance = Importance()
    """Correction for what sampled the tokens."""
    stale: Stale = Stale()
    """Masks for tokens that are too old."""
    kl: NonNegative = 0.0
    """Coefficient of KL(policy || reference), the reference being the policy before the first step."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Its estimate per token. k1 is for `reinforce_pp`, where the KL is part of the reward."""
    kl_discount: Share = 1.0
    """`reinforce_pp`: discount per token of the KL of later tokens."""
    entropy: NonNegative = 0.0
    """Coefficient of the entropy bonus."""
    reduction: Literal["token_mean", "trajectory_mean", "sequence_mean", "trajectory_sum", "constant"] = "token_mean"
    """Mean over the step's trained tokens; mean of the trajectories' (sequences') means; mean of the trajectories' sums; or the sum
    divided by `constant`."""
    constant: Positive | None = None
    """Divisor of `reduction: constant`."""
    distillation: Distillation | None = None
    """A teacher, beside the rewards or (`name: distillation`) in their place."""

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        own = OWN.get(str(value.get("name", "grpo")), {})
        return {**own, **value}

    @model_validator(mode="after")
    def _sensible(self) -> Loss:
        if self.kl_kind == "k1" and self.kl > 0 and self.name != "reinforce_pp":
            raise ValueError("kl_kind = k1 in a loss has a gradient that does not know the reference: use k2 or k3")
        if self.name == "distillation" and self.distillation is None:
            raise ValueError("name = distillation needs a section distillation")
        if self.name == "sft" and self.distillation is not None:
            raise ValueError("name = sft has no advantage that a teacher could add to: use name = distillation")
        if self.importance.level != "none" and self.has_ratio and self.old_policy == "rollout":
            raise ValueError(
                f"importance.level = {self.importance.level} would count the rollout policy twice, since the ratio of {self.name} is to it "
                "already: set old_policy = recomputed, or level = none"
            )
        if self.importance.floor > self.importance.cap:
            raise ValueError("importance.floor is above importance.cap")
        return self

    @property
    def has_ratio(self) -> bool:
        """The objective is a ratio to the old policy."""
        form = None if self.distillation is None else self.distillation.form
        return self.name in RATIO or (self.name, form) == ("distillation", "advantage")

    @property
    def needs_whole_sequences(self) -> bool:
        """The loss of a token follows from other tokens of its sequence: a part of a step must hold sequences whole."""
        return (
            self.name == "gspo"
            or (self.name == "reinforce_pp" and self.kl > 0)
            or self.importance.level == "sequence"
            or self.stale.kl is not None
        )
