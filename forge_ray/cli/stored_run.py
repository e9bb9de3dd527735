"""Opens the store that a command names, and brings it up to date where nobody else does."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.cli.common import run_directory
from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir

if TYPE_CHECKING:
    from forge_ray.report.text import Decode
    from forge_ray.trajectories.store.reader import StoreReader

WHERE = "forge-ray rollouts"


@dataclass(frozen=True)
class StoredRun:
    """A store, and the run that it is of, where that is at hand."""

    reader: StoreReader
    run: RunDir | None = None
    config: Config | None = None

    @property
    def model(self) -> Path | None:
        """The directory of the policy's tokenizer and template."""
        from forge_ray.report.text import model_directory

        return model_directory(self.run) if self.run is not None else None

    @property
    def decode(self) -> Decode:
        """Token ids as text; as numbers where the tokenizer is not at hand."""
        from forge_ray.report.text import decoder, numbers

        return decoder(self.model) if self.model is not None else numbers


def stored_run(where: str, asked: str = WHERE) -> StoredRun:
    """The store of the run directory, run name or location `where`. Raises `UserError`, for what `asked`, where there is none."""
    from forge_ray.trajectories.store.location import Location
    from forge_ray.trajectories.store.reader import StoreReader

    if "://" in where:
        reader = StoreReader(Location.of(where))
        if not reader.location.files("rollouts"):
            raise UserError(f"{where} holds no rollouts", where=asked, fix="give store.location with the run's name behind it")
        return StoredRun(reader)
    path = run_directory(where)
    if (path / "config.yaml").is_file():
        return _of_run(RunDir(path.resolve()))
    if (path / "rollouts").is_dir() and any((path / "rollouts").glob("purpose=*")):
        return StoredRun(StoreReader(Location.of(path)))
    raise UserError(f"{where} is no run (no config.yaml in it) and no store", where=asked, fix="give a run directory, its name, or s3://…")


def _of_run(run: RunDir) -> StoredRun:
    from forge_ray.job import store
    from forge_ray.report.text import model_directory
    from forge_ray.trajectories.store.location import Location
    from forge_ray.trajectories.store.reader import StoreReader

    try:
        config = load(run.config)
    except UserError:  # of another version: what is stored can be read all the same
        return StoredRun(StoreReader(Location.of(run.data)), run)
    location = store.location(config, run)
    reader = StoreReader(location)
    ended = {file.parent.name for file in run.rollouts.glob("*/result.json")}
    missing = ended - set(reader.table("rollouts", ["rollout"])["rollout"].to_pylist())
    if missing:
        with _lock(run) as held:
            if held:
                stored = store.RolloutWriter(config, run, model_directory(run)).complete()
                reader.refresh()
                if stored:  # else another command has just done it
                    print(f"{stored} rollouts of the stopped run were not in its store and are now", file=sys.stderr)
            else:
                print(f"{len(missing)} rollouts that have ended are not in the store yet (the run is going on)", file=sys.stderr)
    return StoredRun(reader, run, config)


@contextmanager
def _lock(run: RunDir) -> Iterator[bool]:
    """Whether nobody drives the run, and nobody will meanwhile; false too where the directory cannot be written. Commands that ask this of
    one run at the same time wait for one another: a reader that is at it is no driver."""
    with ExitStack() as stack:
        try:
            for file, flags, how in (
                (run.config, os.O_RDONLY, fcntl.LOCK_EX),
                (run.root / ".lock", os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                handle = os.open(file, flags | os.O_CLOEXEC, 0o644)
                stack.callback(os.close, handle)
                fcntl.flock(handle, how)
        except OSError:
            yield False
            return
        yield True
