"""One GRPO step: optimizer updates on one step batch. No Ray here, so that it can be tested and read by itself.

A step is `epochs` passes over the batch in `minibatches` optimizer updates each. Every update's loss is a sum over its micro-batches and
ranks with one denominator that was counted over all of them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from forge_ray.config import Config
from forge_ray.train_loop import agreement, forward, schedule
from forge_ray.train_loop.history import WeightHistory
from forge_ray.train_loop.losses import Total, policy_loss
from forge_ray.train_loop.ranks import Ranks

METRICS = ("loss", "policy_loss", "kl", "entropy", "clip_low", "clip_high", "ratio", "old_kl")


def grpo_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[forward.Row],
    config: Config,
    step: int,
    *,
    reference: torch.nn.Module | None,
    history: WeightHistory,
    device: torch.device,
    ranks: Ranks,
    autocast: bool = False,
) -> dict[str, float | None]:
    """Train the batch of step `step` (from 0: the version of the weights that `model` holds); returns the step's metrics.

    Metrics are means over the step's updates, but for those of `agreement.check`, which comes before the first. Raises
    `LogprobMismatch` and `NotFinite` before anything is changed by the batch that shows it.
    """
    train = config.train
    rate = schedule.policy_rate(train.optimizer, step, train.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    limits = {"device": device, "ranks": ranks, "autocast": autocast}
    agreed = agreement.check(
        model,
        rows,
        step,
        bound=train.logprob_bound,
        history=history,
        max_tokens=train.optimizer.microbatch_tokens,
        hint=agreement.remedy(config.engine_dtype, train.precision),
        **limits,
    )
    history.keep(step, getattr(model, "module", model))
    sums = dict.fromkeys(METRICS, 0.0)
    norms: list[float] = []
    updates = 0
    for epoch in range(train.optimizer.epochs):
        parts = forward.minibatches(rows, train.optimizer.minibatches, seed=f"{config.seed}/{step}/{epoch}")
        for part in parts:
            local = forward.total(part)
            counts = ranks.sum(torch.tensor([local.tokens, local.trajectories], dtype=torch.float64))
            total = Total(int(counts[0]), int(counts[1]))
            if total.tokens == 0:
                continue
            shares = _accumulate(model, part, total, config, reference, **limits)
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
        **agreed,
        **({} if train.loss.kl > 0 else {"kl": None}),
    }


def _accumulate(
    model: torch.nn.Module,
    part: Sequence[forward.Row],
    total: Total,
    config: Config,
    reference: torch.nn.Module | None,
    device: torch.device,
    ranks: Ranks,
    autocast: bool,
) -> Tensor:
    """Gradients of one update, summed over micro-batches and ranks; returns the metrics' shares, (len(METRICS),)."""
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
    return shares


def _no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()  # type: ignore[operator]
