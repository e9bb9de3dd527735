"""Weights & Biases: one run there for one run here, gone on with after a resume."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_ray.config.metrics import Wandb


class WeightsAndBiases:
    """Numbers have `step` as their x-axis, so that an evaluation may follow its step and a step may be written again."""

    name = "wandb"

    def __init__(self, settings: Wandb, name: str, directory: Path, config: dict[str, Any]) -> None:
        import wandb

        # The run's name alone may be taken in the project, by another directory's run.
        number = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
        self._run = wandb.init(
            **{
                "project": settings.project, "entity": settings.entity, "mode": settings.mode, "name": name, "id": number,
                "resume": "allow", "dir": str(directory), "config": config, **settings.options,
            }
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
