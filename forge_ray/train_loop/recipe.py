"""What the updates of a run follow from, beside its weights and its batches: the keys of its config that a checkpoint keeps.

A run that goes on under other values trains on under those. Then the steps after its checkpoint whose batches are stored already come out
otherwise than they did, and tokens that were sampled by the weights of then are no longer of any weights that the trainer has: see
`Learner`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_ray.config import Config

FREE = frozenset({"train.optimizer.microbatch_tokens", "train.optimizer.max_skips"})
"""Keys that change no update."""


def of(config: Config) -> dict[str, Any]:
    """Key → value, JSON."""
    train = config.train.model_dump(mode="json", include={"loss", "optimizer", "precision", "lora"})
    found = {"train.lora": train.pop("lora"), **dict(_flat("train", train))}
    if config.train.optimizer.lr_end is not None:
        found["train.steps"] = config.train.steps
    return {key: value for key, value in found.items() if key not in FREE}


def changes(then: dict[str, Any], config: Config) -> list[str]:
    """What differs from the values of `then`, one text for each key that both have."""
    now = of(config)
    return [f"{key} was {then[key]} and is {now[key]}" for key in now if key in then and then[key] != now[key]]


def _flat(prefix: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value
