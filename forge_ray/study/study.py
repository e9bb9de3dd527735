"""A study's directory: what is done stays done, what was cut short is resumed, one process at a time works on it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job.state import hold, refuse_job_copy
from forge_ray.run_dir import write_atomic, write_json
from forge_ray.study.cells import CONFIG, Cell
from forge_ray.study.command import INTERRUPTED, forge_ray

Command = Callable[[Sequence[str]], int]
"""Runs `forge-ray` with these words; returns its exit code."""
FREE = frozenset({"name", "runs", "ray", "metrics", "proxy.port"})
"""Keys and sections that may differ between cells that are compared: where they run, and who is told."""

OWN = frozenset({".lock", CONFIG, "study.json"})
"""Files of a study of which no cell was begun."""


class Study:
    """A directory of cells of one config. Use as a context manager: it is this process's until the end of the body."""

    def __init__(self, root: Path, say: Callable[[str], None], command: Command | None = None) -> None:
        self.root, self._say = root, say
        self._lock: int | None = None
        self._command = command or self._forge_ray
        self.failed: dict[str, int] = {}
        """Exit codes of the cells that ended with an error, by name."""

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def open(self, config: Config, what: Mapping[str, Any], free: Collection[str] = ()) -> None:
        """Make the directory, or take up one of the same config but for the keys in `free`, which are the cells' own; `what` is noted.
        Raises `UserError` for one of another config (its cells would not compare), for the directory of a run, and where another process
        is at work."""
        refuse_job_copy(self.root)
        if (self.root / "state.json").exists():
            raise UserError(f"{self.root} is the directory of a run", where="name", fix="give this study another name: name=…")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {self.root} ({error.strerror})", where="runs", fix="give a directory you may write") from None
        self._lock = hold(self.root, "study")
        kept, tree = self.root / CONFIG, config.model_dump(mode="json")
        if any(entry.name not in OWN for entry in self.root.iterdir()):
            before, now = (_compared(side, free) for side in (yaml.safe_load(kept.read_text()), tree))
            for key in sorted(before.keys() | now.keys()):
                if (was := before.get(key)) != (is_ := now.get(key)):
                    raise UserError(
                        f"{self.root} holds cells of another config: {key} was {was} and is {is_}",
                        where="name",
                        fix="remove it, or give this study another name: name=…",
                    )
        write_atomic(kept, yaml.safe_dump(tree, sort_keys=False))
        write_json(self.root / "study.json", dict(what))

    def run(self, cells: Iterable[Cell]) -> None:
        """Do every cell that is not done yet; one that fails does not keep the others from being done. Raises `KeyboardInterrupt`."""
        cells = list(cells)
        for number, cell in enumerate(cells, 1):
            title = f"cell {number}/{len(cells)}: {cell.name}"
            if cell.done(self.root).is_file():
                self._say(f"{title} is done")
                continue
            words = cell.words(self.root)
            self._say(f"{title}{' is taken up' if '--resume' in words else ''}")
            began = time.monotonic()
            code = self._command(words)
            took = f"{time.monotonic() - began:.0f} s"
            if code == INTERRUPTED:
                left = sum(not other.done(self.root).is_file() for other in cells)
                self._say(f"{title} was stopped after {took}")
                self._say(f"{left} of {len(cells)} cells are left, and the same command goes on with them: {self.root}")
                raise KeyboardInterrupt
            if cell.done(self.root).is_file():
                self.failed.pop(cell.name, None)
                self._say(f"{title} took {took}")
            else:
                self.failed[cell.name] = code
                self._say(f"{title} failed with exit code {code} after {took}; the others go on")

    def end(self, lines: Sequence[str], began: float) -> int:
        """Write and print the table that was begun at `began` (monotonic); the exit code."""
        write_atomic(self.root / "table.md", "\n".join(lines) + "\n")
        self._say("\n".join(["", *lines, "", f"{time.monotonic() - began:.0f} s; table and runs: {self.root}"]))
        if self.failed:
            self._say(f"failed: {', '.join(self.failed)}; the same command tries them again")
        return 1 if self.failed else 0

    def _forge_ray(self, words: Sequence[str]) -> int:
        # The cell holds the lock too: should this process be killed, nobody else begins before the cell has ended as well.
        return forge_ray(words, [] if self._lock is None else [self._lock])


def _compared(tree: Any, free: Collection[str]) -> dict[str, str]:
    ignored = FREE | set(free)
    return {key: value for key, value in _leaves(tree).items() if key not in ignored and key.partition(".")[0] not in ignored}


def _leaves(tree: Any, prefix: str = "") -> dict[str, str]:
    """JSON of every plain value, list and empty mapping, by dotted key."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: json.dumps(tree, sort_keys=True)}
    found: dict[str, str] = {}
    for key, value in tree.items():
        found.update(_leaves(value, f"{prefix}.{key}" if prefix else str(key)))
    return found
