"""`metrics`: where else a run's numbers go."""

from __future__ import annotations

from typing import Any, Literal

from forge_ray.config.values import Section


class Wandb(Section):
    """A run of Weights & Biases. The key comes from `WANDB_API_KEY` or `wandb login`."""

    project: str = "forge-ray"
    """Its project."""
    entity: str | None = None
    """Its team or user; nothing: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: files in `<run>/wandb`, for `wandb sync`."""
    options: dict[str, Any] = {}
    """Further arguments of `wandb.init` (`tags`, `group`, …)."""


class Mlflow(Section):
    """A run of MLflow."""

    tracking_uri: str | None = None
    """A server, or `sqlite:///…`; nothing: `MLFLOW_TRACKING_URI`, else `<run>/mlflow.db`."""
    experiment: str = "forge-ray"
    """Its experiment, made where it is missing."""
    tags: dict[str, str] = {}
    """Tags of the run."""


class Metrics(Section):
    """Where else the numbers of `metrics.jsonl` go, see docs/metrics.md. Whatever fails there never stops a run."""

    ray: bool = True
    """As gauges of Ray: its dashboard, and Prometheus where it collects from Ray."""
    tensorboard: str | None = None
    """Directory for TensorBoard's event files, relative to the run directory; nothing: none. Needs the extra `tensorboard`."""
    wandb: Wandb | None = None
    """Weights & Biases; nothing: none. Needs the extra `wandb`."""
    mlflow: Mlflow | None = None
    """MLflow; nothing: none. Needs the extra `mlflow`."""
