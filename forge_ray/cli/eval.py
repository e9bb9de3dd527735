"""`forge-ray eval run.yaml --checkpoint C --k 4`: pass@1 on the held-out tasks."""

from __future__ import annotations

import argparse

from forge_ray.cli.common import config_of
from forge_ray.errors import UserError
from forge_ray.outcome import RATED


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    if arguments.k is not None and arguments.k < 1:
        raise UserError(f"--k {arguments.k} is no number of rollouts", where="--k", fix="give at least 1")
    from forge_ray.cli.check import require

    require(config, training=False)
    from forge_ray.job import single
    from forge_ray.report.records import outcomes, pass_at_1
    from forge_ray.report.summary import write_summary

    model = single.checkpoint(config, arguments.checkpoint)
    config, directory = single.side_run(config, "eval")
    records = single.run_heldout(config, directory, arguments.k or config.eval.samples, model)
    write_summary(directory)
    rate = pass_at_1(record for record in records if record.outcome in RATED)
    print(f"held-out pass@1: {rate if rate is not None else 'no rollout ended with a reward'}")
    print("outcomes: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes(records).items()))
    print(f"run directory: {directory.root}")
    return 0 if rate is not None else 1
