"""The one directory of a run, `<runs>/<name>/`, and where everything in it lies.

Every process of a run (driver, replicas, pools, train workers) gets the same absolute path; on a cluster it is a shared volume.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ray.disk import sync
from forge_ray.errors import ForgeRayError


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory. Creating the object creates nothing."""

    root: Path

    @property
    def config(self) -> Path:
        """The full config, every default written out (YAML)."""
        return self.root / "config.yaml"

    @property
    def state(self) -> Path:
        """Incarnation, secrets and stage of the run (JSON, mode 0600)."""
        return self.root / "state.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per step."""
        return self.root / "metrics.jsonl"

    @property
    def phases(self) -> Path:
        """One JSON line per finished phase of the driver: which, when, how long."""
        return self.root / "phases.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "run.log"

    @property
    def calls(self) -> Path:
        """The call log: one append-only file per replica incarnation, `<replica>.jsonl`."""
        return self.root / "calls"

    @property
    def bodies(self) -> Path:
        """Request and response bodies by digest, where `proxy.keep_bodies` is on."""
        return self.root / "bodies"

    @property
    def rollouts(self) -> Path:
        """`<rollout id>/` each: `result.json`, `harness.log`, `verifier.log`; and `archive/`."""
        return self.root / "rollouts"

    @property
    def data(self) -> Path:
        """The datasets `calls`, `rollouts` and `samples`, unless `store.location` puts them elsewhere."""
        return self.root / "data"

    @property
    def checkpoints(self) -> Path:
        """`step-000012/`: model, optimizer, cursor, RNG."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """`current.json` ({"version", "path": file name}) and the safetensors file it names: what a (re)started replica loads."""
        return self.root / "weights"

    def current_weights(self, named: str) -> Path:
        """The file that `current.json` means by `named`: beside it, also where an older one holds the path that the run was at."""
        beside = self.weights / Path(named).name
        return beside if beside.exists() or not os.path.isabs(named) else Path(named)

    @property
    def inputs(self) -> Path:
        """What the config's sources made: `model/`, `tasks-train/`, `tasks-heldout/`, `demonstrations.parquet`."""
        return self.root / "inputs"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def create(self, *, training: bool = True) -> RunDir:
        """Make the directory and its folders; those of the learner only for `training`."""
        for path in (
            self.root,
            self.calls,
            self.rollouts,
            self.weights,
            self.inputs,
            *((self.checkpoints,) if training else ()),
        ):
            path.mkdir(parents=True, exist_ok=True)
        return self


def write_atomic(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace `path` by `text`: after a crash the file holds the old text or the new one, and the new one is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """`write_atomic` of `value` as JSON; NaN is refused."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n", mode=mode)


class RunDamaged(ForgeRayError):
    """A file of the run directory does not hold what it should; the message names it."""


def read_state(run: RunDir) -> dict[str, Any]:
    """`state.json`. Raises `RunDamaged`."""
    try:
        state = json.loads(run.state.read_text())
        if not isinstance(state["incarnation"], int) or not bytes.fromhex(state["secret"]):
            raise ValueError("no number and no key")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunDamaged(f"{run.state} is damaged ({error}): put it back from a copy") from None
    return state


def next_incarnation(run: RunDir) -> int:
    """Take a fresh incarnation number, durable before it is used. One process at a time calls this: the driver, then its Exchange."""
    state = read_state(run)
    state["incarnation"] += 1
    write_json(run.state, state, mode=0o600)
    return state["incarnation"]


def secret(run: RunDir) -> bytes:
    """Key of the session tokens."""
    return bytes.fromhex(read_state(run)["secret"])
