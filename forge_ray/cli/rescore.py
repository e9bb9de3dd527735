"""`forge-ray rollouts rescore RUN`: judge what is archived again, and say what changed."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.config import Config
from forge_ray.errors import UserError

if TYPE_CHECKING:
    from forge_ray.report.stored.select import Filter


def rescore(arguments: argparse.Namespace, wanted: Filter) -> int:
    from forge_ray.cli.stored_run import stored_run
    from forge_ray.job import rescore as job
    from forge_ray.report.stored import select

    stored = stored_run(arguments.run)
    if stored.run is None or stored.config is None:
        raise UserError("the archived workspaces are in the run directory, and this is none", where=arguments.run, fix="give that")
    jobs = arguments.jobs if arguments.jobs is not None else os.cpu_count() or 1
    if jobs < 1:
        raise UserError(f"{jobs} sandboxes at a time", where="--jobs", fix="give 1 or more")
    config = _config(stored.config, arguments)
    ids = {row["rollout"] for row in select.rows(stored.reader, wanted, ["rollout"])}
    records = [record for record in job.stored(config, stored.run) if record.id in ids]
    if not records:
        raise UserError("no stored rollout is wanted", where=arguments.run, fix="change the filters")
    tasks = Path(arguments.tasks).expanduser().resolve() if arguments.tasks else None
    done = 0

    def told(_: Any) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done} of {len(records)}", end="\n" if done == len(records) else "", file=sys.stderr, flush=True)

    summary = asyncio.run(job.rescore(config, stored.run, records, tasks=tasks, jobs=jobs, told=told))
    for line in summary.lines():
        print(line)
    if any(row.reward is not None for row in summary.rows):
        print(f"train on the new rewards: forge-ray train run.yaml --from-rollouts {stored.run.root} --rewards {summary.name}")
    return 0


def _config(config: Config, arguments: argparse.Namespace) -> Config:
    """The run's config with the rewards of the command line."""
    from forge_ray.reference import parse

    changes: dict[str, Any] = {}
    if arguments.function:
        changes["reward"] = str(parse(arguments.function, Path.cwd(), "--function"))
    weights = {}
    for text in arguments.weight:
        name, _, value = text.rpartition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise UserError(f"{text!r} is no weight", where="--weight", fix="write NAME=NUMBER, for example correct=1.0")
    if weights:
        changes["reward_weights"] = weights
    if not changes:
        return config
    try:
        rollouts = type(config.rollouts).model_validate({**config.rollouts.model_dump(), **changes})
    except ValueError as error:
        raise UserError(" ".join(str(error).split())[:200], where="--weight", fix="correct it") from None
    return config.model_copy(update={"rollouts": rollouts})
