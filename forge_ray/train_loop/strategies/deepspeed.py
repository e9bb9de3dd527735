"""DeepSpeed ZeRO 1, 2 and 3: optimizer state, gradients and weights shared out over the ranks. The only module that imports deepspeed.

| `zero` | shared out |
|---|---|
| 1 | optimizer state |
| 2 | and gradients |
| 3 | and weights: each is gathered where a forward or backward pass needs it, so all ranks make the same passes |

Invariants: DeepSpeed's own schedules are off (it takes one backward per micro-batch, and the boundary from us); it averages over ranks, so
what it gets is the share times their number; its optimizer is torch's AdamW, which an update that is left out never reaches. On CPU nothing
is compiled: the ranks meet through gloo. On GPUs the ranks meet through nccl (type-checked, run on CPU only).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from forge_ray.config import DeepSpeed, Optimizer
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.strategies.strategy import Applied, adamw, rules

TAG = "state"
"""DeepSpeed's name for what lies in its folder of a checkpoint."""


class Sharded:
    """A `Strategy`."""

    lockstep = True

    def __init__(
        self, model: torch.nn.Module, settings: Optimizer, own: DeepSpeed, ranks: Ranks, device: torch.device, *, bfloat16: bool
    ) -> None:
        self.name = f"deepspeed-{own.zero}"
        self._own, self._ranks, self._device, self._bfloat16, self._settings = own, ranks, device, bfloat16, settings
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._limit = float("inf")
        self._seen = float("nan")
        _prepare(ranks, device)
        import deepspeed

        self.optimizer = adamw(parameters, settings, _Vetoed)
        self.optimizer.veto = self._leave_out
        configuration = own.merged(_ours(own, settings.max_grad_norm, bfloat16))
        self._engine: Any = deepspeed.initialize(model=model, optimizer=self.optimizer, config=configuration, dist_init_required=False)[0]
        self._model = model

    @property
    def model(self) -> torch.nn.Module:
        return self._model

    @property
    def module(self) -> torch.nn.Module:
        return self._engine

    def rate(self, value: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = value

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks.world, scale_wrt_gas=False)

    def step(self, *, max_norm: float, limit: float | None) -> Applied:
        # DeepSpeed clips to the norm that it was built with.
        self._limit, self._seen = float("inf") if limit is None else limit, float("nan")
        self._engine.step()
        done = self._seen < float("inf") and self._seen <= self._limit
        return Applied(self._seen, done)

    def frozen(self, model: torch.nn.Module) -> torch.nn.Module:
        model.eval().requires_grad_(False)
        if self._own.zero < 3:
            return model.to(self._device)
        import deepspeed

        return deepspeed.initialize(model=model, config=_base(self._own, self._bfloat16), dist_init_required=False)[0]

    def own(self) -> list[Tensor]:
        held: list[Tensor] = []
        for parameter in self._trained():
            shard = getattr(parameter, "ds_tensor", None)
            if shard is not None:
                held.append(shard.data)
            if parameter.numel():  # whole here: always below stage 3, and small ones there
                held.append(parameter.data)
        return held

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                with deepspeed.zero.GatheredParameters(parameter, enabled=self._own.zero == 3):
                    yield name, parameter.detach()

    def save(self, directory: Path) -> None:
        self._engine.save_checkpoint(str(directory / "deepspeed"), tag=TAG, save_latest=False, exclude_frozen_parameters=True)

    def restore(self, directory: Path) -> None:
        found, _ = self._engine.load_checkpoint(
            str(directory / "deepspeed"), tag=TAG, load_module_strict=False, load_lr_scheduler_states=False
        )
        if found is None:
            raise FileNotFoundError(f"{directory / 'deepspeed' / TAG} holds no state of DeepSpeed's")
        rules(self._engine.optimizer, self._settings)

    def close(self) -> None:
        # DeepSpeed's own tables name every parameter, and so keep them and what hangs on them.
        self._engine.destroy()

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for parameter in self._model.parameters() if parameter.requires_grad)

    def _leave_out(self) -> bool:
        """Asked by the optimizer, once per group of weights, when the norm is known and before a moment moves."""
        self._seen = float(self._engine.optimizer._global_grad_norm)
        return not self._seen <= self._limit or self._seen == float("inf")


class _Vetoed(torch.optim.AdamW):
    """AdamW that asks before it steps."""

    veto: Any = None

    def step(self, closure: Any = None) -> Any:
        return None if self.veto is not None and self.veto() else super().step(closure)


def _base(own: DeepSpeed, bfloat16: bool) -> dict[str, Any]:
    # DeepSpeed turns an autocast around it off. Its own would send the gradients of named modules in bfloat16: no module is named.
    cast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}}
    return {
        **(cast if bfloat16 else {}),
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed's bookkeeping alone: micro-batches are cut by tokens
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**31,
        "zero_optimization": {"stage": own.zero, "overlap_comm": torch.cuda.is_available(), "contiguous_gradients": True},
    }


def _ours(own: DeepSpeed, max_norm: float, bfloat16: bool) -> dict[str, Any]:
    return {
        **_base(own, bfloat16),
        "gradient_clipping": max_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _prepare(ranks: Ranks, device: torch.device) -> None:
    """The process group that DeepSpeed wants even of one process, and no compiler on CPU."""
    import torch.distributed as dist

    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.(all_gather_into|reduce_scatter)_tensor.* is deprecated")
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = cast(Any, dist).HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    for name, value in (("RANK", ranks.rank), ("LOCAL_RANK", device.index or 0), ("WORLD_SIZE", ranks.world)):
        os.environ.setdefault(name, str(value))
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    if device.type == "cpu":
        # Else its first collective compiles kernels for shared memory, for a minute or two, and needs a compiler for it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
