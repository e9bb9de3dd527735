"""MLflow: one run there for one run here, gone on with after a resume (its id is in `<run>/mlflow.json`)."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_ray.config.metrics import Mlflow
from forge_ray.run_dir import write_json

LONGEST = 500
"""Characters of a parameter's value."""
BATCH = 1000
"""Numbers that a server takes at once."""


def accepted(name: str) -> str:
    """`name` as MLflow takes it. It refuses a whole line for one name with another character, or one that is no plain path; a verifier's
    rewards and a task's kind are called as their authors like."""
    return "/".join(re.sub(r"[^\w.\- ]", "_", part).strip(".") or "_" for part in name.split("/"))


class MlflowRun:
    """By MLflow's client; nothing of it is global to the process but the tracking address that is passed."""

    name = "mlflow"

    def __init__(self, settings: Mlflow, name: str, directory: Path, config: Mapping[str, Any]) -> None:
        import os

        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # else it tells of each table that it makes
        address = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=address)
        known = directory / "mlflow.json"
        if known.is_file():
            self._run = json.loads(known.read_text())["run"]
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(settings.experiment)
        self._run = self._client.create_run(experiment, run_name=name, tags=dict(settings.tags)).info.run_id
        write_json(known, {"run": self._run, "tracking_uri": address})
        from mlflow.entities import Param

        self._client.log_batch(self._run, params=[Param(key, str(value)[:LONGEST]) for key, value in config.items()])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(accepted(name), value, now, step) for name, value in values.items()]
        for at in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run, metrics=metrics[at : at + BATCH])

    def close(self) -> None:
        self._client.set_terminated(self._run)
