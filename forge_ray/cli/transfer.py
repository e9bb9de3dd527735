"""`forge-ray transfer run.yaml [--train a,b,a+b] [--eval a,b]`: the table train-harness × eval-harness."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_ray.cli.common import config_file, config_of
from forge_ray.errors import UserError
from forge_ray.run_dir import write_atomic


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    if config.tasks.heldout is None:
        raise UserError("tasks.heldout is not set", where="forge-ray transfer", fix="name the held-out tasks in the config")
    from forge_ray.study import transfer
    from forge_ray.study.cells import Study

    made = transfer.plan(config, arguments.train, arguments.eval)
    from forge_ray.cli.check import require

    require(config)
    root = Path(config.runs) / f"{config.name}-transfer"
    study = Study(root, str(config_file(arguments).resolve()), arguments.overrides, lambda line: print(line, flush=True))
    study.open(config, {"train": [transfer.row_name(names) for names in made.train], "eval": list(made.evaluate)})
    print(f"study: {root}, {len(made.train)} trainings, {(len(made.train) + 1) * len(made.evaluate)} evaluations", flush=True)
    study.run(transfer.trainings(config, made))
    study.run(transfer.evaluations(config, made, root, arguments.k))
    lines = transfer.table(config, made, root)
    write_atomic(root / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0
