"""Learning rates, as functions of the number of steps done before. A step is one step batch of the configuration: into how
many samples, micro-batches or optimizer updates it falls moves no schedule. No step has rate 0 unless the config asks for `lr_end: 0`.
"""

from __future__ import annotations

from forge_ray.config import Optimizer, Sft


def policy_rate(config: Optimizer, step: int, steps: int) -> float:
    """Rate of step `step` (from 0) of `steps`: linear from `lr` at the first to `lr_end` at the last, which holds afterwards."""
    if config.lr_end is None or step <= 0 or steps <= 1:
        return config.lr
    return config.lr + (config.lr_end - config.lr) * min(1.0, step / (steps - 1))


def sft_rate(config: Sft, step: int) -> float:
    """Rate of SFT step `step` (from 0) of `config.steps`: `warmup_steps` of linear rise that ends at `lr`, then `lr`, then a linear fall
    over the last `decay_fraction` of the steps that would reach 0 one step after the end."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    tail = config.steps * min(1.0, config.decay_fraction)
    fall = min(1.0, max(0.0, config.steps - step) / tail) if tail else 1.0
    return config.lr * min(warm, fall)
