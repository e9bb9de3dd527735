"""Opening a run: its directory and its identity.

Invariants: a run directory belongs to one config, and a new run never writes into an old one. Every start of a driver and of a
train worker group takes a fresh incarnation number from `state.json` (`run_dir.next_incarnation`), so that a version label never
names two sets of weights.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import yaml

from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir, write_atomic, write_json


def create(config: Config) -> RunDir:
    """Make the directory of a new run. Raises `UserError` if it exists, or lies in a submitted job's temporary copy."""
    root = Path(config.runs) / config.name
    refuse_job_copy(root)
    if root.exists() and any(root.iterdir()):
        raise UserError(
            f"run directory {root} exists",
            where="name",
            fix=f"continue it with `forge-ray train --resume {root}` or choose another: name=…",
        )
    try:
        run = RunDir(root).create()
    except OSError as error:
        raise UserError(f"cannot make {root} ({error.strerror})", where="runs", fix="give a directory you may write") from None
    write_atomic(run.config, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    write_json(run.state, {"incarnation": 0, "secret": secrets.token_hex(32)}, mode=0o600)
    return run


def reopen(where: str, runs: str | None = None) -> tuple[Config, RunDir]:
    """The config and directory of an existing run, given its path, or its name below `runs`."""
    root = Path(os.path.expanduser(where))
    if not root.is_dir() and runs is not None:
        root = Path(runs) / where
    run = RunDir(root.resolve())
    if not run.config.is_file() or not run.state.is_file():
        raise UserError(f"{where} is no run directory (no config.yaml and state.json in it)", where="--resume", fix="give <runs>/<name>")
    return load(run.config), run.create()


def refuse_job_copy(root: Path) -> None:
    """`ray job submit --working-dir` runs in a temporary copy that is deleted later: a run must not land there."""
    if "_ray_pkg_" in str(root) and "runtime_resources" in root.parts:
        raise UserError(
            f"{root} lies in the submitted job's temporary copy",
            where="runs",
            fix="give an absolute path, for example runs: ~/forge-ray-runs",
        )
