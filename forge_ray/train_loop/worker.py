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
from forge_ray.errors import ForgeRayError, UserError
from forge_ray.run_dir import RunDir

PROGRESS_EVERY_S = 1.0


def train_worker(settings: dict[str, Any]) -> None:
    """Ray Train's entry: `settings` holds config, run, model, demonstrations, teacher (paths) and the exchange's handle."""
    try:
        _train(settings)
    except ForgeRayError as error:
        # Ray Train restarts a worker group for whatever it raises; what we raise on purpose would only come again.
        import ray

        ray.get(settings["exchange"].post.remote({"kind": "failed", "error": str(error), "input": isinstance(error, UserError)}))


def _train(settings: dict[str, Any]) -> None:
    import ray
    import ray.train
    import torch
    from ray.train.torch import get_device

    from forge_ray.train_loop.exchange import CLOSED
    from forge_ray.train_loop.learner import Learner
    from forge_ray.train_loop.ranks import of_process

    config = Config.model_validate(settings["config"])
    run, exchange, train = RunDir(Path(settings["run"])), settings["exchange"], config.train
    rank = ray.train.get_context().get_world_rank()
    if train.threads:
        torch.set_num_threads(train.threads)
    device = get_device()
    ranks = of_process(device)

    def post(event: dict[str, Any]) -> None:
        if rank == 0:
            ray.get(exchange.post.remote(event))

    def supervise(strategy: Any, passes: Any) -> None:
        _supervised(strategy, passes, config, settings["demonstrations"], post)

    learner = Learner(
        config,
        run,
        Path(settings["model"]),
        ranks=ranks,
        device=device,
        incarnation=ray.get(exchange.begin.remote()) if rank == 0 else 0,
        tell=post,
        supervise=None if train.sft is None else supervise,
        teacher=Path(settings["teacher"]) if settings.get("teacher") else None,
    )

    sender: Any = None
    if train.sync.backend == "nccl":
        from forge_ray.serve_proxy.client import nccl_sender

        sender = nccl_sender(config, rank, learner.strategy.tensors)

    def publish(metrics: dict[str, Any] | None, restored: dict[str, Any] | None = None, stats: dict[str, Any] | None = None) -> None:
        version, path = learner.publish()
        if sender is not None:
            sender.send(version)
        event = {"kind": "weights", "step": learner.step, "version": version, "path": str(path)}
        post({**event, "node": ray.get_runtime_context().get_node_id(), "metrics": metrics, "restored": restored, "stats": stats})

    _announce(learner.step)
    publish(None, learner.restored)
    while learner.step < train.steps:
        asked = time.time()
        got: Any = ray.get(exchange.get_step.remote(learner.step, rank))
        if got == CLOSED:
            return
        part = learner.part(share(got["ref"]))
        began = time.time()
        metrics = learner.train(part)
        metrics |= {"wait_s": began - asked, "train_s": time.time() - began}
        publish(metrics, stats=got["stats"])
        if learner.step % train.checkpoint_every == 0 or learner.step == train.steps:
            learner.save(metrics)
            _announce(learner.step)


def share(refs: list[Any]) -> Any:
    """The rank's share of a step batch, out of `refs` (ObjectRefs of Arrow tables): one Arrow table, read as a Ray Dataset.

    Everything of it happens in this process. A Dataset made of the references themselves asks for a whole CPU to look at each table, which
    a small cluster whose CPUs are taken never has; and a dataset per step must cost milliseconds, so nothing is prefetched.
    """
    import pyarrow
    import ray
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    blocks = ray.get(refs)
    dataset = ray.data.from_blocks(blocks)
    tables = list(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    return pyarrow.concat_tables(tables) if tables else blocks[0].schema.empty_table()


def _supervised(strategy: Any, passes: Any, config: Config, demonstrations: str | None, post: Any) -> None:
    import pyarrow.parquet

    from forge_ray.train_loop import forward, sft

    recipe = config.train.sft
    assert recipe is not None and demonstrations is not None
    path = Path(demonstrations)
    table = pyarrow.parquet.read_table(path / "demonstrations.parquet" if path.is_dir() else path, columns=["ids", "mask"])
    rows = forward.demonstration_rows(table)
    size = strategy.model.get_input_embeddings().num_embeddings
    if not rows or (most := max(int(row.ids.max()) for row in rows)) >= size:
        problem = f"token {most} is beyond the model's {size}" if rows else "no demonstration has a token whose mask is true"
        raise UserError(problem, where="train.sft.demonstrations", fix="make them with the policy's tokenizer")
    last = 0.0

    def report(step: int, loss: float) -> None:
        nonlocal last
        if time.time() - last >= PROGRESS_EVERY_S:
            last = time.time()
            post({"kind": "progress", "phase": "sft", "detail": f"step {step}/{recipe.steps} loss {loss:.3f}"})

    loss = sft.train(strategy, rows, recipe, config.seed, passes=passes, report=report)
    post({"kind": "progress", "phase": "sft", "detail": f"done, loss {loss:.3f} on {len(rows)} demonstrations"})


def _announce(step: int) -> None:
    """A barrier over the ranks, and a sign of life for Ray Train.

    The checkpoint itself is not given to Ray Train: it would want it below its own directory and complain about those that `prune` removed.
    """
    import ray.train

    ray.train.report({"step": step})
