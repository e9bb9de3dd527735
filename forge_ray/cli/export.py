"""`forge-ray export RUN DIR [--step N | --best]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_ray.cli.common import run_directory
from forge_ray.config import load
from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir


def run(arguments: argparse.Namespace) -> int:
    directory = RunDir(run_directory(arguments.run).resolve())
    if not directory.config.is_file():
        raise UserError(f"{arguments.run} is no run (no config.yaml in it)", where="forge-ray export", fix="give its directory or its name")
    config = load(directory.config)
    from forge_ray.job import retention
    from forge_ray.train_loop import checkpoint
    from forge_ray.train_loop.export import export

    why = ""
    if arguments.step is not None:
        step = arguments.step
    elif arguments.best:
        by: retention.By = config.train.keep_best or ("heldout" if retention.scores(directory, "heldout") else "reward")
        found = retention.best(directory, by)
        if found is None:
            raise UserError("no checkpoint has been evaluated", where="--best", fix="give --step N, or evaluate with eval.every")
        step = found
        why = f" ({'held-out pass@1' if by == 'heldout' else 'mean reward'} {retention.scores(directory, by)[step]:.3f})"
    else:
        newest = checkpoint.latest(directory)
        if newest is None:
            raise UserError(f"{directory.root} has no checkpoint", where="forge-ray export", fix="train first")
        step = newest
    template = Path(config.policy.chat_template) if config.policy.chat_template else None
    target = export(directory, step, Path(arguments.directory).expanduser(), chat_template=template, adapter=arguments.adapter)
    print(f"step {step}{why}: {target}")
    return 0
