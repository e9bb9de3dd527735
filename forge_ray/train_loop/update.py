"""One GRPO step: optimizer updates on one step batch. No Ray here, so that it can be tested and read by itself.

A step is `epochs` passes over the batch in `minibatches` optimizer updates each. Every update's loss is a sum over its micro-batches and
ranks with one denominator that was counted over all of them first. Before the first update the trainer holds exactly the weights of the
current version: there mean |rollout − trainer logprob| of tokens sampled by that version must be numerical noise; above the bound
the step stops, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forge_ray.config import Config
from forge_ray.errors import ForgeRayError
from forge_ray.train_loop import forward, schedule
from forge_ray.train_loop.losses import Total, policy_loss

METRICS = ("loss", "policy_loss", "kl", "entropy", "clip_low", "clip_high", "ratio", "old_kl")


class LogprobMismatch(ForgeRayError):
    """The engine and the trainer disagree about tokens that the current weights sampled."""

    def __init__(self, mean: float, bound: float, tokens: int, step: int) -> None:
        super().__init__(
            f"step {step}: mean |rollout - trainer logprob| is {mean:.2e} over {tokens} tokens of the current version, above "
            f"train.logprob_bound = {bound:g}: engine and trainer do not hold the same policy "
            "(weights, dtype, template or sampling parameters)"
        )


@dataclass
class Reducer:
    """Sums over the ranks; on one rank the identity."""

    world: int = 1
    sum: Callable[[Tensor], Tensor] = field(default=lambda values: values)


def reducer(device: torch.device) -> Reducer:
    """The reducer of this process's torch.distributed group, if there is one."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Reducer()

    def total(values: Tensor) -> Tensor:
        moved = values.to(device)
        dist.all_reduce(moved)
        return moved.to(values.device)

    return Reducer(dist.get_world_size(), total)


def grpo_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[forward.Row],
    config: Config,
    step: int,
    *,
    reference: torch.nn.Module | None,
    device: torch.device,
    ranks: Reducer,
    autocast: bool = False,
) -> dict[str, float]:
    """Train the batch of step `step` (from 0, the version that the rollouts' freshest tokens have); returns the step's metrics.

    Metrics are means over the step's updates; `logprob_diff` (None where no token is fresh) belongs to the first update only.
    """
    train = config.train
    rate = schedule.policy_rate(train.optimizer, step, train.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    sums = dict.fromkeys(METRICS, 0.0)
    norms: list[float] = []
    fresh: float | None = None
    fresh_tokens = 0
    updates = 0
    for epoch in range(train.optimizer.epochs):
        parts = forward.minibatches(rows, train.optimizer.minibatches, seed=f"{config.seed}/{step}/{epoch}")
        for number, part in enumerate(parts):
            local = forward.total(part)
            counts = ranks.sum(torch.tensor([local.tokens, local.trajectories], dtype=torch.float64))
            total = Total(int(counts[0]), int(counts[1]))
            if total.tokens == 0:
                continue
            first = epoch == 0 and number == 0
            shares, seen = _accumulate(model, part, total, config, step if first else None, reference, device, ranks, autocast)
            if first:
                seen = ranks.sum(seen)
                fresh_tokens = int(seen[1])
                fresh = float(seen[0] / seen[1]) if fresh_tokens else None
                if fresh is not None and not fresh <= train.logprob_bound:
                    optimizer.zero_grad(set_to_none=True)
                    raise LogprobMismatch(fresh, train.logprob_bound, fresh_tokens, step)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), train.optimizer.max_grad_norm)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            updates += 1
            for name, value in zip(METRICS, ranks.sum(shares).tolist(), strict=True):
                sums[name] += value
    mean = {name: value / max(1, updates) for name, value in sums.items()}
    return {
        **mean,
        "clip_fraction": mean["clip_low"] + mean["clip_high"],
        "grad_norm": sum(norms) / max(1, len(norms)),
        "lr": rate,
        "updates": updates,
        **({"logprob_diff": fresh, "fresh_tokens": fresh_tokens} if fresh is not None else {"fresh_tokens": 0}),
    }


def _accumulate(
    model: torch.nn.Module,
    part: Sequence[forward.Row],
    total: Total,
    config: Config,
    fresh_step: int | None,
    reference: torch.nn.Module | None,
    device: torch.device,
    ranks: Reducer,
    autocast: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of one update, summed over micro-batches and ranks.

    Returns the metrics' shares, (len(METRICS),), and [sum, count] of the fresh tokens' absolute difference.
    """
    loss_config = config.train.loss
    batches = forward.microbatches(part, config.train.optimizer.microbatch_tokens, device)
    passes = len(batches)
    if ranks.world > 1:
        # Every rank makes the same number of passes: a collective inside backward must meet its partners.
        import torch.distributed as dist

        most = torch.tensor(passes, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        passes = int(most)
        batches += forward.microbatches([], 1, device) * (passes - len(batches))
    shares = torch.zeros(len(METRICS), dtype=torch.float64)
    seen = torch.zeros(2, dtype=torch.float64)
    for index, batch in enumerate(batches):
        with _no_sync(model) if index < passes - 1 else nullcontext():
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                logprobs, entropy = forward.token_logprobs(model, batch, entropy=True)
                reference_logprobs = None
                if reference is not None:
                    with torch.no_grad():
                        reference_logprobs, _ = forward.token_logprobs(reference, batch)
            loss, metrics = policy_loss(
                loss_config,
                logprobs=logprobs,
                entropy=entropy,
                total=total,
                reference_logprobs=reference_logprobs,
                **batch.loss_inputs(),
            )
            # DDP averages over the ranks, the loss is a share of a sum.
            (loss * ranks.world).backward()
        shares += torch.tensor([metrics.get(name, 0.0) for name in METRICS], dtype=torch.float64)
        if fresh_step is not None:
            fresh = batch.steps == fresh_step
            seen += torch.tensor(
                [float((logprobs.detach() - batch.old_logprobs).abs()[fresh].double().sum()), float(fresh.sum())], dtype=torch.float64
            )
    return shares, seen


def _no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()  # type: ignore[operator]
