"""Opening a run: its directory and its identity.

Invariants: a run directory belongs to one config, a new run never writes into an old one, and one process at a time drives a run (a
file lock, which ends with its holder: two drivers would train the same rollouts). Every start of a driver and of a
train worker group takes a fresh incarnation number from `state.json` (`run_dir.next_incarnation`), so that a version label never
names two sets of weights.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
from pathlib import Path

import yaml

from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.job import numbering
from forge_ray.run_dir import RunDir, write_atomic, write_json

log = logging.getLogger(__name__)

_made: set[Path] = set()
"""Run directories that this process made."""


def create(config: Config, *, training: bool = True) -> RunDir:
    """Make the directory of a new run, of one that trains or not. Raises `UserError` if it exists, or lies in a submitted job's copy."""
    root = Path(config.runs) / config.name
    refuse_job_copy(root)
    if os.path.lexists(root) and not root.is_dir():
        raise UserError(f"{root} is no directory", where="runs", fix="remove it, or choose another name: name=…")
    if root.exists() and not _unborn(root):
        raise UserError(
            f"run directory {root} exists",
            where="name",
            fix=f"continue it with `forge-ray train --resume {root}` or choose another: name=…",
        )
    if not root.exists() or any(root.iterdir()):  # what another start left is as little worth
        _made.add(root)
    try:
        run = RunDir(root).create(training=training)
    except OSError as error:
        raise UserError(f"cannot make {root} ({error.strerror})", where="runs", fix="give a directory you may write") from None
    hold(run.root)
    write_atomic(run.config, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    write_json(run.state, {"incarnation": 0, "secret": secrets.token_hex(32)}, mode=0o600)
    return run


def discard(run: RunDir, *, but_logs: bool = False) -> None:
    """Remove the directory of a run that was refused, if this process made it and nothing in it is worth keeping. `but_logs`: leave what
    the functions that make inputs have printed; the same name may be given again all the same."""
    worth = (run.rollouts.glob("*/result.json"), run.checkpoints.glob("step-*"), run.data.glob("samples/step=*/*.parquet"))
    if run.root not in _made or any(any(found) for found in worth):
        return
    if not but_logs:
        shutil.rmtree(run.root, ignore_errors=True)
        return
    for entry in [*run.root.iterdir(), *run.inputs.iterdir()]:
        if entry.is_dir() and entry != run.inputs:
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.is_file() and not _said(entry, run.root):
            entry.unlink(missing_ok=True)


def _said(file: Path, root: Path) -> bool:
    """Whether `file` holds what a function that makes inputs has printed."""
    return file.suffix == ".log" and file.parent == RunDir(root).inputs


def reopen(where: str, runs: str | None = None) -> tuple[Config, RunDir]:
    """The config and directory of an existing run, given its path, or its name below `runs`."""
    root = Path(os.path.expanduser(where))
    if not root.is_dir() and runs is not None:
        root = Path(runs) / where
    run = RunDir(root.resolve())
    if not run.config.is_file() or not run.state.is_file():
        raise UserError(f"{where} is no run directory (no config.yaml and state.json in it)", where="--resume", fix="give <runs>/<name>")
    hold(run.root)
    config = load(run.config)
    # Before anything is started; what only the inputs tell is compared when they are there.
    numbering.check(run, numbering.of_config(config))
    return config, run.create()


def _unborn(root: Path) -> bool:
    """Whether `root` holds nothing but what a start leaves that ended before the run had its identity."""
    for entry in root.iterdir():
        started = entry.name in (".lock", "config.yaml") or entry.name.startswith((".config.yaml.", ".state.json."))
        if not started and not (entry.is_dir() and all(_said(below, root) for below in entry.iterdir())):
            return False
    return True


def hold(root: Path, what: str = "run") -> int:
    """Make this process the one that is at work on the run (or study) in `root`: until it ends, or closes the file that is returned. Raises
    `UserError` if another one is."""
    try:
        handle = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", where=str(root), fix="continue your own runs only") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another process is at work on this {what}", where=str(root), fix="wait for it or stop it first") from None
    except OSError as error:  # a file system without locks
        log.warning("%s cannot be locked (%s): make sure that one process at a time works on it", root, error)
    return handle


def refuse_job_copy(root: Path) -> None:
    """`ray job submit --working-dir` runs in a temporary copy that is deleted later: a run must not land there."""
    if "_ray_pkg_" in str(root) and "runtime_resources" in root.parts:
        raise UserError(
            f"{root} lies in the submitted job's temporary copy",
            where="runs",
            fix="give an absolute path, for example runs: ~/forge-ray-runs",
        )
