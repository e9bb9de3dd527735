"""`forge-ray transfer run.yaml [--train a,b,a+b] [--eval a,b]`: the table train-harness × eval-harness."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from forge_ray.cli.common import config_of
from forge_ray.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    if config.tasks.heldout is None:
        raise UserError("tasks.heldout is not set", where="forge-ray transfer", fix="name the held-out tasks in the config")
    if arguments.k is not None and arguments.k < 1:
        raise UserError(f"--k {arguments.k} is no number of rollouts", where="--k", fix="give at least 1")
    from forge_ray.cli.check import require
    from forge_ray.study import transfer
    from forge_ray.study.study import Study

    began, made, k = time.monotonic(), transfer.plan(config, arguments.train, arguments.eval), arguments.k
    root = Path(config.runs) / f"{config.name}-transfer"
    with Study(root, lambda line: print(line, flush=True)) as study:
        study.open(config, {"train": made.train, "eval": made.evaluate, "k": k})
        require(config)
        print(f"study: {root}, {len(made.train)} trainings, {len(made.train) + 1} × {len(made.evaluate)} evaluations", flush=True)
        study.run(transfer.trainings(config, made))
        study.run(transfer.evaluations(config, made, root, k))
        return study.end(transfer.table(config, made, root, k), began)
