"""`forge-ray train run.yaml [key=value …]` and `forge-ray train --resume RUN`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir


def run(arguments: argparse.Namespace) -> int:
    config, directory, resume = _open(arguments)
    from forge_ray.cli.check import require

    require(config)
    if config.train.steps and all(config.taught(harness) for harness in config.harnesses):
        raise UserError("every harness talks to another model than the policy", where="harnesses", fix="use forge-ray eval")
    from forge_ray.job.state import create, discard
    from forge_ray.job.train import train

    if directory is None:
        directory = create(config)
    print(f"run directory: {directory.root}", flush=True)
    try:
        summary = train(config, directory, resume=resume)
    except KeyboardInterrupt:
        print(f"stopped; continue with: forge-ray train --resume {directory.root}", flush=True)
        raise
    except UserError:
        discard(directory)
        raise
    for line in summary.lines():
        print(line)
    print(f"report: {directory.report}")
    if shutil.which("forge-ray") is None:
        print(f"for forge-ray's other commands: . {Path(sys.prefix) / 'bin' / 'activate'}")
    return 0


def _open(arguments: argparse.Namespace) -> tuple[Config, RunDir | None, bool]:
    if arguments.resume:
        if arguments.config or arguments.overrides:
            raise UserError("a resumed run keeps its config", where="--resume", fix="leave out the config and the overrides")
        from forge_ray.job.state import reopen

        config, directory = reopen(arguments.resume)
        return config, directory, True
    if not arguments.config:
        raise UserError("no config given", where="forge-ray train", fix="give a run.yaml, or --resume RUN")
    return load(arguments.config, arguments.overrides), None, False
