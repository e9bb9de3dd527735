"""The cells of a study: each a command, and the file that exists once it is done."""

from __future__ import annotations

import glob
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

CONFIG = "config.yaml"
"""The study's config, in its directory: every cell starts from it, whatever has become of the user's file meanwhile."""
EVALUATIONS = "evaluations"
"""Directory of the evaluations' run directories."""
LONGEST = 40
"""Characters of a cell's name, before a number that is put behind it."""


@dataclass(frozen=True)
class Training:
    """A cell that trains: a run directory below the study's."""

    name: str
    overrides: tuple[str, ...] = ()
    begun_by: str | None = None
    """A cell that differs from this one only in what comes after the start. If it is done, its supervised start and the evaluation of that
    are this cell's too, and neither is made again."""
    supervised: bool = False
    """Whether there is a supervised start."""

    def done(self, root: Path) -> Path:
        return root / self.name / "summary.json"

    def words(self, root: Path) -> list[str]:
        """The command: resumed where the run exists already."""
        if (root / self.name / "state.json").is_file():
            return ["train", "--resume", str(root / self.name)]
        return ["train", str(root / CONFIG), *self.overrides, *self._start(root), f"name={self.name}", f"runs={root}"]

    def _start(self, root: Path) -> list[str]:
        if self.begun_by is None or not (root / self.begun_by / "summary.json").is_file():
            return []
        if not self.supervised:
            return ["eval.before=false"]
        model = start(root, self.begun_by)
        return [f"policy.model={model}", "train.sft=null", "eval.before=false"] if model.is_dir() else []


@dataclass(frozen=True)
class Evaluation:
    """A cell that evaluates a checkpoint (None: the initial policy); its estimates are one JSON file."""

    name: str
    checkpoint: str | None
    overrides: tuple[str, ...] = ()
    k: int | None = None

    def done(self, root: Path) -> Path:
        return root / f"{self.name}.json"

    def words(self, root: Path) -> list[str]:
        """The command: resumed where an evaluation was cut short."""
        side, out = root / EVALUATIONS, ["--json", str(self.done(root))]
        begun = sorted(side.glob(f"{glob.escape(self.name)}-eval-*/plan.json"))
        if begun:
            return ["eval", "--resume", str(begun[-1].parent), *out]
        chosen = [] if self.checkpoint is None else ["--checkpoint", self.checkpoint]
        samples = [] if self.k is None else ["--k", str(self.k)]
        return ["eval", str(root / CONFIG), *chosen, *samples, *out, *self.overrides, f"name={self.name}", f"runs={side}"]


Cell = Training | Evaluation


def start(root: Path, name: str) -> Path:
    """The policy that a training cell with a supervised start has begun with."""
    return root / name / "checkpoints" / "step-000000"


def plain(words: str) -> str:
    """`words` as a cell's name: as they are if they may be one, else what can be read of them and a number that tells them apart."""
    text = re.sub(r"[^A-Za-z0-9._]+", "-", words).strip("-._")
    if text == words and len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 7]}-{hashlib.sha256(words.encode()).hexdigest()[:6]}".lstrip("-")
