"""A learner on a very small model, several ranks of it, and rollouts that its own policy sampled: for tests of training without Ray."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import start_processes
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge_ray.config import Config
from forge_ray.run_dir import RunDir
from forge_ray.train_loop.forward import Row
from forge_ray.train_loop.learner import Learner
from forge_ray.train_loop.part import Passes
from forge_ray.train_loop.ranks import Ranks, of_process
from forge_ray.train_loop.rows import Rows

CPU = torch.device("cpu")
VOCABULARY = 40


def small_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, tie_word_embeddings=True, max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    return Qwen3ForCausalLM(shape).train()


def config(**train: Any) -> Config:
    return Config.model_validate(
        {
            "name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t", "heldout": "h"},
            "train": {"steps": 4, "groups_per_step": 2, "group_size": 2, **train},
        }
    )  # fmt: skip


def rollouts(step: int, count: int = 5) -> list[Row]:
    """Rows of one token sequence each, at two temperatures; their log-probabilities are not known yet."""
    draw = np.random.default_rng(100 + step)
    rows = []
    for number in range(count):
        ids = draw.integers(1, VOCABULARY, int(draw.integers(8, 20))).astype(np.int64)
        positions = np.sort(draw.choice(np.arange(1, len(ids)), 5, replace=False))
        temperature = np.full(5, 1.0 if number % 2 else 0.7, np.float32)
        advantage = np.full(5, 1.0 if number % 2 else -0.5, np.float32)
        sampled = np.zeros(5, np.float32), np.full(5, step)
        rows.append(Row(f"r{step}-{number}", ids, positions, sampled[0], advantage, np.ones(5, np.float32), temperature, sampled[1], 5))
    return rows


def sampled(learner: Learner, rows: list[Row]) -> Rows:
    """The rows as the learner's policy would have sampled them now. Collective where the strategy's passes are."""
    scores = Rows(rows).score(learner.strategy.module, learner.passes)
    for row, own in zip(rows, np.split(scores, np.cumsum([len(row.positions) for row in rows])[:-1]) if rows else [], strict=True):
        row.old_logprobs, row.steps = own, np.full(len(own), learner.step)
    return Rows(rows)


def learner_of(settings: Config, folder: Path, ranks: Ranks | None = None, **more: Any) -> Learner:
    """In `folder/run`, from the model in `folder/model`."""
    given = {"ranks": ranks or Ranks(), "device": CPU, "incarnation": 1, **more}
    return Learner(settings, RunDir(folder / "run").create(), folder / "model", **given)


def import_all() -> None:
    """What a learner imports when it is needed."""
    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401


def plain_passes() -> Passes:
    """Of a model as transformers loads it."""
    return Passes(CPU, 10_000)


def with_model(folder: Path) -> Path:
    small_model().save_pretrained(folder / "model")
    return folder


def in_groups(worlds: list[int], folder: Path, work: Callable[..., Any], *arguments: Any) -> list[list[Any]]:
    """`work(ranks, folder / number of the group, *arguments)` on gloo groups of these sizes, all at once; results by group and rank."""
    folder.mkdir(parents=True, exist_ok=True)
    start_processes(_rank, args=(worlds, str(folder), work, arguments), nprocs=sum(worlds), start_method="spawn")
    return [[pickle.loads((folder / f"{group}-{rank}.pickle").read_bytes()) for rank in range(world)] for group, world in enumerate(worlds)]


def _rank(index: int, worlds: list[int], folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = 0
    while index >= worlds[group]:
        index -= worlds[group]
        group += 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{group}", rank=index, world_size=worlds[group])
    own = Path(folder, str(group))
    own.mkdir(exist_ok=True)
    result = work(of_process(CPU), own, *arguments)
    Path(folder, f"{group}-{index}.pickle").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
