"""The configuration of a run: one tree, read from YAML, changed by dotted overrides, every key documented below its field.

Unknown keys are refused with the nearest known name; a value of the wrong type is refused with file, section and line. Relative
paths are taken from the config file's directory. `load()` is the only way in; the models are frozen.

A *source* (`policy.model`, `tasks.train`, `train.sft.demonstrations` …) is a directory or file, or `file.py:function`: a function of
yours that makes it. The function is called as `function(out, seed=…, **options)` with an empty directory `out`.
"""

from __future__ import annotations

from forge_ray.config.advantage import Advantage
from forge_ray.config.credit import Credit
from forge_ray.config.keys import known_keys
from forge_ray.config.load import load
from forge_ray.config.lora import Lora
from forge_ray.config.loss import Loss
from forge_ray.config.metrics import Metrics
from forge_ray.config.optimizer import Optimizer, Sft
from forge_ray.config.policy import EvalSampling, Policy, Sampling
from forge_ray.config.proxy import Limits, Proxy, Upstream
from forge_ray.config.rollouts import Harness, Rollouts, Sandbox, Tasks
from forge_ray.config.run import Config, Eval, Ray
from forge_ray.config.store import Store
from forge_ray.config.strategy import DeepSpeed
from forge_ray.config.train import Train
from forge_ray.config.values import Section, Source

__all__ = [
    "Advantage", "Config", "Credit", "DeepSpeed", "Eval", "EvalSampling", "Harness", "Limits", "Lora", "Loss", "Metrics", "Optimizer",
    "Policy", "Proxy", "Ray", "Rollouts", "Sampling", "Sandbox", "Section", "Sft", "Source", "Store", "Tasks", "Train", "Upstream",
    "known_keys", "load",
]  # fmt: skip
