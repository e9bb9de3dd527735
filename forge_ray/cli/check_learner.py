"""What of `train` cannot come true together, seen from the config alone: each would otherwise show after the first step, or never."""

from __future__ import annotations

from collections.abc import Iterator

from forge_ray.config import Config, Train
from forge_ray.trajectories.credit import kind_weights

Problem = tuple[str, str, str]
"""Key, what is wrong, and what to do."""

TIGHT = Train.model_fields["logprob_bound"].default
"""A bound that float32 on both sides keeps, and nothing else does."""


def problems(config: Config) -> Iterator[Problem]:
    """All of them."""
    if config.train.offline is None and config.train.steps and config.train.logprob_bound <= TIGHT:
        yield from _agreement(config)
    yield from _best(config)
    if not any(kind_weights(config.train.credit).values()):
        yield "train.credit.kind_weights", "every kind of call weighs 0, so that nothing would be trained", "give one of them a weight"


def _agreement(config: Config) -> Iterator[Problem]:
    """Settings under which engine and trainer are further apart than `train.logprob_bound`."""
    train, sampling = config.train, config.policy.sampling
    if sampling.top_p < 1 or sampling.top_k:
        name, value = ("top_p", sampling.top_p) if sampling.top_p < 1 else ("top_k", sampling.top_k)
        yield (
            f"policy.sampling.{name}",
            f"{value:g} cuts the distribution, whose log-probabilities are recorded; the trainer's are of the whole one, further away than "
            f"train.logprob_bound = {train.logprob_bound:g}",
            f"leave {name} out, or raise the bound",
        )
    engine = {"float": "float32", "half": "float16"}.get(config.engine_dtype, config.engine_dtype)
    if engine != "auto" and (engine, train.precision) != ("float32", "float32"):
        yield (
            "train.logprob_bound",
            f"{train.logprob_bound:g} is for float32; the engine computes in {engine} (policy.engine.dtype), the trainer in "
            f"{train.precision} (train.precision)",
            "raise it (examples/recipes have 0.05), or set both to float32",
        )


def _best(config: Config) -> Iterator[Problem]:
    """A best checkpoint of which there will never be a score."""
    train, evaluation = config.train, config.eval
    if train.keep_best != "heldout":
        return
    if train.offline is not None:
        yield "train.keep_best", "heldout, and a run on stored rollouts evaluates nothing", "set train.keep_best=null"
    elif config.tasks.heldout is None or not (evaluation.before or evaluation.after or evaluation.every):
        yield "train.keep_best", "heldout, and nothing is evaluated", "set tasks.heldout and eval.every, or keep_best: reward"
