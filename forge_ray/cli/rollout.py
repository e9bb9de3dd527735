"""`forge-ray rollout run.yaml --task T --harness H`: one rollout, printed call by call."""

from __future__ import annotations

import argparse

from forge_ray.cli.common import config_of
from forge_ray.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    from forge_ray.report.records import harness_title

    names = {title: entry.name for entry in config.harnesses for title in (harness_title(entry.name), entry.name)}
    asked = arguments.harness or config.harnesses[0].name
    if asked not in names:
        raise UserError(f"{asked!r} is not among the config's harnesses", where="--harness", fix=f"choose from {', '.join(names)}")
    harness = names[asked]
    from forge_ray.cli.check import require

    require(config, training=False)
    from forge_ray.job import single
    from forge_ray.report.text import decoder
    from forge_ray.report.trajectory import print_trajectory

    model = single.checkpoint(config, arguments.checkpoint)
    config, directory = single.side_run(config, "rollout")
    record = single.run_one(config, directory, arguments.task, harness, model)
    from forge_ray.report.text import model_directory

    for line in print_trajectory(single.calls(directory, record), decoder(model or model_directory(directory)), record):
        print(line)
    print(f"run directory: {directory.root}")
    return 0
