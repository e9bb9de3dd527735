"""`train.deepspeed`: how DeepSpeed shares a model out, where `train.strategy` is `deepspeed`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from forge_ray.config.values import Section

OURS = {
    "optimizer": "train.optimizer",
    "scheduler": "train.optimizer.lr_end",
    "gradient_clipping": "train.optimizer.max_grad_norm",
    "gradient_accumulation_steps": "train.optimizer.microbatch_tokens",
    "managed_gradient_accumulation": "train.optimizer.microbatch_tokens",
    "train_batch_size": "train.groups_per_step",
    "train_micro_batch_size_per_gpu": "train.optimizer.microbatch_tokens",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "torch_autocast": "train.precision",
}
"""Keys of DeepSpeed's config that follow from others of ours."""


class DeepSpeed(Section):
    """DeepSpeed ZeRO."""

    zero: Literal[1, 2, 3] = 2
    """What the workers share out: 1 optimizer state; 2 and gradients; 3 and weights."""
    options: dict[str, Any] = {}
    """Any other key of DeepSpeed's config, as DeepSpeed writes it: `zero_optimization: {offload_optimizer: {device: cpu}}`."""

    @model_validator(mode="after")
    def _not_ours(self) -> DeepSpeed:
        for name in self.options:
            if name in OURS:
                raise ValueError(f"options.{name} follows from {OURS[name]}: set that")
        zero = self.options.get("zero_optimization", {})
        if not isinstance(zero, dict) or "stage" in zero:
            raise ValueError("options.zero_optimization is a mapping without `stage`, which is `zero`")
        return self

    def merged(self, base: dict[str, Any]) -> dict[str, Any]:
        """`base` with `options` over it, mapping by mapping."""
        return _merge(base, self.options)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
