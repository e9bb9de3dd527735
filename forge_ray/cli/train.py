"""`forge-ray train run.yaml [--from-rollouts RUN,…] [key=value …]` and `forge-ray train --resume RUN`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.cli.common import run_directory
from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir

if TYPE_CHECKING:
    from forge_ray.job.stored_source import StoredSource


FROM = "--from-rollouts"
NOT_OFFLINE = ("tasks.", "rollouts.", "harness", "sandbox", "proxy", "upstream")
"""Topics of `forge-ray check` that do not matter where no harness runs."""


def run(arguments: argparse.Namespace) -> int:
    config, directory, resume = _open(arguments)
    from forge_ray.cli import check_machine
    from forge_ray.cli.check import require

    offline = config.train.offline is not None
    if resume and not offline and not check_machine.joins(config):
        check_machine.await_port(config, lambda line: print(line, flush=True))
    require(config, without=NOT_OFFLINE if offline else ())
    if not offline and config.train.steps and all(config.taught(harness) for harness in config.harnesses):
        raise UserError("every harness talks to another model than the policy", where="harnesses", fix="use forge-ray eval")
    from forge_ray.job.sources import SourceError
    from forge_ray.job.state import create, discard
    from forge_ray.job.train import train

    sources = _sources(config)
    if directory is None:
        found = None
        if offline:
            from forge_ray.job.offline import prepare

            config, found = prepare(config, sources)
        directory = create(config)
        if found is not None:
            from forge_ray.job.stored_groups import keep

            keep(directory, found)
    print(f"run directory: {directory.root}", flush=True)
    try:
        summary = train(config, directory, resume=resume, sources=sources)
    except KeyboardInterrupt:
        print(f"stopped; continue with: forge-ray train --resume {directory.root}", flush=True)
        raise
    except UserError as error:
        discard(directory, but_logs=isinstance(error, SourceError))
        raise
    if shutil.which("forge-ray") is None:
        print(f"for forge-ray's other commands: . {Path(sys.prefix) / 'bin' / 'activate'}")
    for line in summary.lines():
        print(line)
    print(f"report: {directory.report}")
    return 0


def _open(arguments: argparse.Namespace) -> tuple[Config, RunDir | None, bool]:
    if arguments.resume:
        if arguments.config or arguments.overrides or arguments.from_rollouts is not None or arguments.rewards is not None:
            raise UserError("a resumed run keeps its config", where="--resume", fix="leave out the config and the overrides")
        from forge_ray.job.state import reopen

        config, directory = reopen(str(run_directory(arguments.resume)))
        return config, directory, True
    if not arguments.config:
        raise UserError("no config given", where="forge-ray train", fix="give a run.yaml, or --resume RUN")
    return load(arguments.config, [*arguments.overrides, *_offline(arguments)]), None, False


def _offline(arguments: argparse.Namespace) -> list[str]:
    """The overrides that `--from-rollouts` and `--rewards` stand for."""
    found = []
    if arguments.from_rollouts is not None:
        runs = [run for run in arguments.from_rollouts.split(",") if run]
        if not runs:
            raise UserError("no run is named", where=FROM, fix="write run directories, names or stores, separated by commas")
        found.append(f"train.offline.runs={json.dumps([_absolute(run) for run in runs])}")
    if arguments.rewards is not None:
        if not found and load(arguments.config, arguments.overrides).train.offline is None:
            raise UserError("rewards are chosen for stored rollouts", where="--rewards", fix="give --from-rollouts RUN with it")
        found.append(f"train.offline.rewards={json.dumps(arguments.rewards)}")
    return found


def _absolute(run: str) -> str:
    """A run given on the command line: a path from here, or the name of a run."""
    return run if "://" in run else str(run_directory(run).resolve())


def _sources(config: Config) -> list[StoredSource]:
    """The stores of `train.offline`, opened. Raises `UserError`."""
    if config.train.offline is None:
        return []
    from forge_ray.cli.stored_run import stored_run
    from forge_ray.job.stored_source import StoredSource

    found = []
    for run in config.train.offline.runs:
        stored = stored_run(run, FROM)
        found.append(StoredSource(stored.config.name if stored.config else Path(run.partition("?")[0]).name, stored.reader))
    return found
