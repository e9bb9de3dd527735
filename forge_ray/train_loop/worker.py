"""The train worker: what every process of the TorchTrainer runs, from the first weights to the last step.

    model ← newest checkpoint, else the initial model (then SFT, checkpoint 0)
    publish the weights of step k; then, per step: fetch the batch, update, publish k + 1, checkpoint where due

Invariants: the worker group takes a fresh incarnation before it publishes anything; weights of step k are published before the
batch of step k is asked for; a checkpoint is complete on disk before it is announced. Rank 0 alone publishes, saves and reports.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from forge_ray.config import Config
from forge_ray.errors import ForgeRayError
from forge_ray.run_dir import RunDir

PROGRESS_EVERY_S = 1.0


def train_worker(settings: dict[str, Any]) -> None:
    """Ray Train's entry: `settings` holds config, run, model, demonstrations (paths) and the exchange's handle."""
    try:
        _train(settings)
    except ForgeRayError as error:
        # Ray Train restarts a worker group for whatever it raises; what we raise on purpose would only come again.
        import ray

        ray.get(settings["exchange"].post.remote({"kind": "failed", "error": str(error)}))


def _train(settings: dict[str, Any]) -> None:
    import ray
    import ray.train
    import torch
    from ray.train.torch import get_device

    from forge_ray.train_loop import checkpoint, weight_sync
    from forge_ray.train_loop.exchange import CLOSED
    from forge_ray.train_loop.history import WeightHistory
    from forge_ray.train_loop.ranks import of_process
    from forge_ray.train_loop.update import grpo_step

    config = Config.model_validate(settings["config"])
    run, exchange, train = RunDir(Path(settings["run"])), settings["exchange"], config.train
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    if train.threads:
        torch.set_num_threads(train.threads)
    torch.manual_seed(config.seed)
    device = get_device()
    ranks = of_process(device)
    autocast = train.precision == "bfloat16"

    def post(event: dict[str, Any]) -> None:
        if rank == 0:
            ray.get(exchange.post.remote(event))

    newest, damaged = checkpoint.newest(run)
    for what in damaged:
        post({"kind": "note", "text": f"a checkpoint is left out: {what}"})
    start = _agree(newest, world)
    incarnation = ray.get(exchange.begin.remote()) if rank == 0 else 0
    initial = Path(settings["model"])
    source = initial if start is None else checkpoint.path(run, start)
    post({"kind": "progress", "phase": "trainer", "detail": f"loading {source.name}"})
    model: Any = checkpoint.load(source)
    model.to(device).train()

    def save(step: int, optimizer: Any, metrics: dict[str, Any] | None) -> None:
        if rank == 0:
            # With the step's metrics: a driver that dies before it has written them down would leave a hole in the resumed run's.
            extra = {"incarnation": incarnation, "seed": config.seed, "metrics": metrics}
            path = checkpoint.save(run, step, model, optimizer, tokenizer_from=initial, extra=extra)
            checkpoint.prune(run, train.keep_checkpoints, upto=step, protect=0 if train.loss.kl > 0 else None)
            post({"kind": "checkpoint", "step": step, "path": str(path)})
        _announce(step)

    if start is None:
        start = 0
        if train.sft is not None:
            _supervised(model, config, settings["demonstrations"], rank, ranks, device, autocast, post)
        save(0, None, None)

    reference: Any = None
    if train.loss.kl > 0:
        reference = checkpoint.load(checkpoint.path(run, 0))
        reference.to(device).eval().requires_grad_(False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.optimizer.lr, betas=train.optimizer.betas, weight_decay=train.optimizer.weight_decay
    )
    restored = checkpoint.restore(run, start, optimizer) if start > 0 else None

    def publish(
        step: int, metrics: dict[str, Any] | None, restored: dict[str, Any] | None = None, stats: dict[str, Any] | None = None
    ) -> None:
        if rank == 0:
            version = f"{incarnation}.{step}"
            path = weight_sync.publish(run, model, version)
            post(
                {
                    "kind": "weights",
                    "step": step,
                    "version": version,
                    "path": str(path),
                    "metrics": metrics,
                    "restored": restored,
                    "stats": stats,
                }
            )

    history = WeightHistory(train.max_staleness)
    publish(start, None, restored)
    for step in range(start, train.steps):
        asked = time.time()
        got: Any = ray.get(exchange.get_step.remote(step, rank))
        if got == CLOSED:
            return
        rows = share(got["ref"])
        began = time.time()
        metrics = grpo_step(
            wrapped, optimizer, rows, config, step, reference=reference, history=history, device=device, ranks=ranks, autocast=autocast
        )
        seconds = time.time() - began
        metrics |= {"wait_s": began - asked, "train_s": seconds}
        publish(step + 1, metrics, stats=got["stats"])
        if (step + 1) % train.checkpoint_every == 0 or step + 1 == train.steps:
            save(step + 1, optimizer, metrics)


def share(refs: list[Any]) -> list[Any]:
    """The rank's share of a step batch, out of `refs` (ObjectRefs of Arrow tables): rows of a Ray Dataset.

    Everything of it happens in this process. A Dataset made of the references themselves asks for a whole CPU to look at each table, which
    a small cluster whose CPUs are taken never has; and a dataset per step must cost milliseconds, so nothing is prefetched.
    """
    import pyarrow
    import ray
    import ray.data

    from forge_ray.train_loop import forward
    from forge_ray.trajectories.schema import conform

    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_blocks(ray.get(refs))
    tables = list(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    return forward.rows(conform(pyarrow.concat_tables(tables))) if tables else []


def _supervised(
    model: Any, config: Config, demonstrations: str | None, rank: int, ranks: Any, device: Any, autocast: bool, post: Any
) -> None:
    import pyarrow.parquet

    from forge_ray.train_loop import forward, sft

    assert config.train.sft is not None and demonstrations is not None
    path = Path(demonstrations)
    table = pyarrow.parquet.read_table(path / "demonstrations.parquet" if path.is_dir() else path, columns=["ids", "mask"])
    rows = forward.demonstration_rows(table)
    last = 0.0

    def report(step: int, loss: float) -> None:
        nonlocal last
        if time.time() - last >= PROGRESS_EVERY_S:
            last = time.time()
            post({"kind": "progress", "phase": "sft", "detail": f"step {step}/{config.train.sft.steps} loss {loss:.3f}"})  # type: ignore[union-attr]

    loss = sft.train(
        model,
        rows,
        config.train.sft,
        config.seed,
        rank=rank,
        ranks=ranks,
        device=device,
        max_tokens=config.train.optimizer.microbatch_tokens,
        report=report,
        autocast=autocast,
    )
    post({"kind": "progress", "phase": "sft", "detail": f"done, loss {loss:.3f} on {len(rows)} demonstrations"})


def _announce(step: int) -> None:
    """A barrier over the ranks, and a sign of life for Ray Train.

    The checkpoint itself is not given to Ray Train: it would want it below its own directory and complain about those that `prune` removed.
    """
    import ray.train

    ray.train.report({"step": step})


def _agree(step: int | None, world: int) -> int | None:
    """Rank 0's view of the newest checkpoint, on every rank."""
    if world == 1:
        return step
    import torch.distributed as dist

    box = [step]
    dist.broadcast_object_list(box, src=0)
    return box[0]
