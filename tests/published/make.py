"""Makes `losses.json`: what TRL's and veRL's own code says of random inputs, for `tests/unit/test_losses_published.py`.

Neither is a dependency. Made with torch 2.13.0, trl 1.16.0 and verl 0.9.1, installed beside the environment:

    uv pip install --target DIR --no-deps trl==1.16.0 verl==0.9.1 tensordict accelerate datasets dill multiprocess xxhash omegaconf \
        antlr4-python3-runtime==4.9.3 hydra-core codetiming pyvers orjson
    PYTHONPATH=DIR python tests/published/make.py

TRL's `GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss` run as they are, on an object with the fields that they read and with
given log-probabilities in place of a model's; veRL's losses are functions. A row is one completion: one sequence and one trajectory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROWS, LENGTH = 5, 7
LONGEST = 9
"""TRL's `max_completion_length`."""
Case = tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]


def inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=draw, dtype=torch.float64)

    logprobs = -torch.rand(ROWS, LENGTH, generator=draw, dtype=torch.float64) * 3 - 0.05
    lengths = torch.tensor([7, 2, 5, 1, 6])
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + normal(0.3),
        "rollout_logprobs": logprobs + normal(0.5),
        "reference_logprobs": logprobs + normal(0.4),
        "entropy": torch.rand(ROWS, LENGTH, generator=draw, dtype=torch.float64) * 2,
        "advantages": torch.tensor([1.3, -0.7, -1.1, 0.4, 0.0], dtype=torch.float64)[:, None].expand(ROWS, LENGTH).clone(),
        "mask": (torch.arange(LENGTH)[None] < lengths[:, None]).double(),
    }


def trl(given: dict[str, torch.Tensor]) -> dict[str, Case]:
    GRPOTrainer = import_module("trl.trainer.grpo_trainer").GRPOTrainer
    RLOOTrainer = import_module("trl.trainer.rloo_trainer").RLOOTrainer

    def run(trainer: Any, logprobs: torch.Tensor, settings: dict[str, Any], more: dict[str, torch.Tensor]) -> torch.Tensor:
        nothing = torch.zeros(ROWS, 0, dtype=torch.long)
        same = SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x)
        fields: dict[str, Any] = {
            "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, given["entropy"], None),
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "_entropy_bonus_enabled": settings.get("entropy_coef", 0) > 0,
            "accelerator": same, "args": SimpleNamespace(use_bias_correction_kl=False, delta=settings.get("delta"), steps_per_generation=1),
            "aux_loss_enabled": False, "beta": 0.0, "current_gradient_accumulation_steps": 1, "entropy_coef": 0.0, "epsilon_high": 0.2,
            "epsilon_low": 0.2, "get_off_policy_mask": GRPOTrainer.get_off_policy_mask, "importance_sampling_level": "token",
            "loss_type": "grpo", "max_completion_length": LONGEST, "model": torch.nn.Identity().train(), "off_policy_mask_threshold": None,
            "top_entropy_quantile": 1.0, "use_adaptive_entropy": False, "use_vllm": False, "vllm_importance_sampling_correction": False,
            **settings,
        }  # fmt: skip
        batch = {
            "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
            "completion_mask": given["mask"], "advantages": given["advantages"][:, 0], "old_per_token_logps": given["old_logprobs"],
            "ref_per_token_logps": given["reference_logprobs"], "num_items_in_batch": given["mask"].sum(), **more,
        }  # fmt: skip
        return trainer._compute_loss(SimpleNamespace(**fields), None, batch)

    def grpo(**settings: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda logprobs: run(GRPOTrainer, logprobs, settings, {})

    def rloo(logprobs: torch.Tensor) -> torch.Tensor:
        # At the first update the policy is the old one.
        return run(RLOOTrainer, logprobs, {}, {"old_logps": (logprobs.detach() * given["mask"]).sum(1)})

    wide = {"clip_low": 0.2, "clip_high": 0.28}
    asked = {"epsilon_low": 0.2, "epsilon_high": 0.28}
    return {
        "grpo": ({"name": "grpo", "reduction": "trajectory_mean", **wide}, grpo(**asked)),
        "grpo with kl": (
            {"name": "grpo", "reduction": "trajectory_mean", "clip_low": 0.2, "clip_high": 0.2, "kl": 0.05},
            grpo(beta=0.05),
        ),
        "grpo with entropy": ({"name": "grpo", "entropy": 0.02, **wide}, grpo(loss_type="bnpo", entropy_coef=0.02, **asked)),
        "grpo with delta": ({"name": "grpo", "reduction": "trajectory_mean", "clip_dual": 1.4, **wide}, grpo(delta=1.4, **asked)),
        "grpo with off-policy mask": (
            {"name": "grpo", "reduction": "trajectory_mean", "stale": {"kl": 0.02}, **wide},
            grpo(off_policy_mask_threshold=0.02, **asked),
        ),
        "dr_grpo": ({"name": "dr_grpo", "constant": ROWS * LONGEST}, grpo(loss_type="dr_grpo")),
        "dapo": ({"name": "dapo"}, grpo(loss_type="dapo", **asked)),
        "gspo": (
            {"name": "gspo", "clip_low": 0.05, "clip_high": 0.08},
            grpo(importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08),
        ),
        "cispo": ({"name": "cispo", "clip_high": 0.3}, grpo(loss_type="cispo", epsilon_high=1.3)),
        "rloo": ({"name": "rloo"}, rloo),
    }  # fmt: skip


def verl(given: dict[str, torch.Tensor]) -> dict[str, Case]:
    core_algos = import_module("verl.trainer.ppo.core_algos")
    compute_rollout_correction_weights = import_module("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights
    ActorConfig = import_module("verl.workers.config").ActorConfig

    mask, old = given["mask"], given["old_logprobs"]

    def run(name: str, how: str, low: float, high: float, dual: float = 1e9, **correction: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def loss(logprobs: torch.Tensor) -> torch.Tensor:
            settings = ActorConfig(
                strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual
            )  # fmt: skip
            weights = None
            if correction:
                weights, _ = compute_rollout_correction_weights(old - given["rollout_logprobs"], mask, **correction)
            function = core_algos.get_policy_loss_fn(name)
            return function(old, logprobs, given["advantages"], mask, how, settings, weights)[0]

        return loss

    def with_kl(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def loss(logprobs: torch.Tensor) -> torch.Tensor:
            kl = core_algos.kl_penalty(logprobs, given["reference_logprobs"], kind)
            return run("vanilla", "token-mean", 0.2, 0.28)(logprobs) + 0.05 * core_algos.agg_loss(kl, mask, "token-mean")

        return loss

    def correct(level: str, threshold: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return run("vanilla", "token-mean", 0.2, 0.28, rollout_is=level, rollout_is_threshold=threshold)

    decoupled = {"name": "grpo", "old_policy": "recomputed"}
    return {
        "vanilla": ({"name": "grpo"}, run("vanilla", "token-mean", 0.2, 0.28)),
        "vanilla with dual clip": ({"name": "grpo", "clip_dual": 1.5}, run("vanilla", "token-mean", 0.2, 0.28, 1.5)),
        "vanilla, mean of sums": ({"name": "grpo", "reduction": "trajectory_sum"}, run("vanilla", "seq-mean-token-sum", 0.2, 0.28)),
        "gspo": ({"name": "gspo", "clip_low": 0.05, "clip_high": 0.08}, run("gspo", "seq-mean-token-mean", 0.05, 0.08)),
        "cispo": ({"name": "cispo", "clip_low": 0.2, "clip_high": 0.3}, run("cispo", "token-mean", 0.2, 0.3)),
        "k2": ({"name": "grpo", "kl": 0.05, "kl_kind": "k2"}, with_kl("k2")),
        "k3": ({"name": "grpo", "kl": 0.05, "kl_kind": "k3"}, with_kl("k3")),
        "tis token": ({**decoupled, "importance": {"level": "token", "cap": 1.5}}, correct("token", 1.5)),
        "tis sequence": ({**decoupled, "importance": {"level": "sequence", "cap": 1.5}}, correct("sequence", 1.5)),
        "icepop": ({**decoupled, "importance": {"level": "token", "mode": "mask", "cap": 1.5, "floor": 0.6}}, correct("token", "0.6_1.5")),
    }  # fmt: skip


def main() -> None:
    given = inputs()
    cases: dict[str, Any] = {}
    for source, found in (("trl", trl(given)), ("verl", verl(given))):
        for name, (config, loss) in found.items():
            logprobs = given["logprobs"].clone().requires_grad_()
            value = loss(logprobs)
            (gradient,) = torch.autograd.grad(value, logprobs)
            cases[f"{source}: {name}"] = {"config": config, "loss": value.item(), "gradient": gradient.tolist()}
    made = {"inputs": {name: value.tolist() for name, value in given.items()}, "cases": cases}
    Path(__file__).with_name("losses.json").write_text(json.dumps(made, indent=None, separators=(",", ":")) + "\n")
    print("\n".join(f"{name:34} {case['loss']: .6f}" for name, case in cases.items()))


if __name__ == "__main__":
    main()
