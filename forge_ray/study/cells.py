"""Cells and their directory: what is done stays done, what was cut short is resumed, one process at a time works on a study."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ray.config import Config
from forge_ray.errors import ForgeRayError, UserError
from forge_ray.job.state import refuse_job_copy
from forge_ray.run_dir import write_json

Command = Callable[[Sequence[str]], int]
"""Runs `forge-ray` with these words; returns its exit code."""


class CellFailed(ForgeRayError):
    """A cell's command ended with an error; what it said stands above."""


@dataclass(frozen=True)
class Training:
    """A cell that trains: a run directory below the study's."""

    name: str
    overrides: tuple[str, ...] = ()

    def done(self, root: Path) -> Path:
        return root / self.name / "summary.json"

    def words(self, root: Path, config: str, overrides: Sequence[str]) -> list[str]:
        """The command: resumed where the run exists already."""
        run = root / self.name
        if (run / "state.json").is_file():
            return ["train", "--resume", str(run)]
        return ["train", config, *overrides, *self.overrides, f"name={self.name}", f"runs={root}"]


@dataclass(frozen=True)
class Evaluation:
    """A cell that evaluates a checkpoint (None: the initial policy); its estimates are one JSON file."""

    name: str
    checkpoint: str | None
    overrides: tuple[str, ...] = ()
    k: int | None = None

    def done(self, root: Path) -> Path:
        return root / f"{self.name}.json"

    def words(self, root: Path, config: str, overrides: Sequence[str]) -> list[str]:
        chosen = [] if self.checkpoint is None else ["--checkpoint", self.checkpoint]
        samples = [] if self.k is None else ["--k", str(self.k)]
        side = [f"name={self.name[:60]}", f"runs={root / 'evaluations'}"]
        return ["eval", config, *chosen, *samples, "--json", str(self.done(root)), *overrides, *self.overrides, *side]


Cell = Training | Evaluation


class Study:
    """A directory of cells of one config."""

    def __init__(
        self, root: Path, config: str, overrides: Sequence[str], say: Callable[[str], None], command: Command | None = None
    ) -> None:
        self.root, self._config, self._overrides, self._say = root, config, tuple(overrides), say
        self._command = command or forge_ray

    def open(self, config: Config, what: dict[str, Any]) -> None:
        """Make the directory, or take up one of the same config. Raises `UserError` for one of another: its cells would not compare."""
        refuse_job_copy(self.root)
        tree = config.model_dump(mode="json", exclude={"name", "runs", "seed"})
        study = {**what, "config": self._config, "digest": hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()}
        file = self.root / "study.json"
        if file.is_file():
            known = json.loads(file.read_text())
            if known.get("digest") != study["digest"]:
                raise UserError(
                    f"{self.root} holds cells of another config",
                    where="name",
                    fix="remove it, or give this study another name: name=…",
                )
        self.root.mkdir(parents=True, exist_ok=True)
        write_json(file, study)

    def run(self, cells: Iterable[Cell]) -> None:
        """Do every cell that is not done yet. Raises `CellFailed`, `KeyboardInterrupt`."""
        cells = list(cells)
        for number, cell in enumerate(cells, 1):
            if cell.done(self.root).is_file():
                self._say(f"cell {number}/{len(cells)}: {cell.name} is done")
                continue
            self._say(f"cell {number}/{len(cells)}: {cell.name}")
            code = self._command(cell.words(self.root, self._config, self._overrides))
            if code == 130:
                raise KeyboardInterrupt
            if code or not cell.done(self.root).is_file():
                raise CellFailed(f"cell {cell.name} ended with exit code {code}; the same command goes on from here")


def forge_ray(words: Sequence[str]) -> int:
    """This command line in a process of its own, on this terminal. A Ctrl-C reaches it too, and is waited out."""
    process = subprocess.Popen([sys.executable, "-m", "forge_ray.cli.main", *words])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def plain(words: str) -> str:
    """`words` as part of a cell's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", words).strip("-.") or "x"
