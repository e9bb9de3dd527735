"""Does what is learned in one harness help in another? Train-harness × eval-harness, in the form of OpenForgeRL's Table 5.

A row is a set of harnesses that the policy was trained in, all with the same config otherwise (the same steps and rollouts in all: a set
of three gives each a third) and from the same start; the first row is that start: the initial policy, or what the supervised start made
of it. A column is a harness that it is evaluated in. A row is evaluated in all its columns by one engine. In brackets: the difference to
the first row, paired by task, with a star where the sign-flip test gives p < 0.05.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ray.config import Config, Harness
from forge_ray.errors import UserError
from forge_ray.report.evaluation.comparison import SURE, compare
from forge_ray.report.records import harness_title
from forge_ray.study.cells import Evaluation, Training, plain, start

START = "start"
"""Name of the first row."""


@dataclass(frozen=True)
class Plan:
    """Which harnesses are trained in together, and which are evaluated in; names as in the config."""

    train: tuple[tuple[str, ...], ...]
    evaluate: tuple[str, ...]


def plan(config: Config, train: str | None, evaluate: str | None) -> Plan:
    """From `a,b,a+b` and `a,b`; by default each harness alone and all together, evaluated in each. Raises `UserError`."""
    names = {short: harness.name for harness in config.harnesses for short in (harness.name, title(config, harness.name))}
    alone = [harness.name for harness in config.harnesses]

    def known(where: str, name: str) -> str:
        if name not in names:
            use = ", ".join(title(config, name) for name in alone)
            raise UserError(f"no harness {name!r}", where=where, fix=f"use those of the config: {use}")
        return names[name]

    sets = [tuple(known("--train", name) for name in part.split("+")) for part in train.split(",")] if train else []
    columns = tuple(known("--eval", name) for name in evaluate.split(",")) if evaluate else tuple(alone)
    return Plan(tuple(sets or [*((name,) for name in alone), *([tuple(alone)] if len(alone) > 1 else [])]), columns)


def title(config: Config, name: str) -> str:
    """What a harness is called in a table: one from a file by its class, where no other has that name."""
    ends = Counter(harness_title(harness.name) for harness in config.harnesses)
    end = harness_title(name)
    return end if ends[end] == 1 else name


def row_name(config: Config, names: Sequence[str]) -> str:
    return "+".join(title(config, name) for name in names)


def _only(config: Config, names: Sequence[str]) -> str:
    """The override that leaves only these harnesses."""
    kept = [harness for harness in config.harnesses if harness.name in names]
    return f"harnesses={json.dumps([Harness.model_dump(harness, mode='json') for harness in kept])}"


def _cell_name(config: Config, names: Sequence[str]) -> str:
    return f"trained-{plain('_'.join(title(config, name) for name in names))}"


def trainings(config: Config, made: Plan) -> list[Training]:
    """One cell for each set. What they are worth is measured afterwards, of all in the same harnesses. The first makes the start of all."""
    first, cells = _cell_name(config, made.train[0]), []
    for names in made.train:
        name = _cell_name(config, names)
        overrides = (_only(config, names), "eval.before=false", "eval.after=false")
        cells.append(Training(name, overrides, None if name == first else first, config.train.sft is not None))
    return cells


def evaluations(config: Config, made: Plan, root: Path, k: int | None) -> list[Evaluation]:
    """A cell for each row whose training is done."""
    rows: list[tuple[str, str | None]] = []
    for cell in trainings(config, made):
        if not cell.done(root).is_file():
            continue
        saved = sorted((root / cell.name / "checkpoints").glob("step-*"))
        if not saved:
            raise UserError(
                f"{root / cell.name} has no checkpoint", where="forge-ray transfer", fix="remove that directory and start again"
            )
        if not rows:
            rows.append((START, str(start(root, cell.name)) if cell.supervised else None))
        rows.append((cell.name, str(saved[-1])))
    return [Evaluation(_evaluation(config, made, row, k), model, (_only(config, made.evaluate),), k) for row, model in rows]


def _evaluation(config: Config, made: Plan, row: str, k: int | None) -> str:
    """A cell's name: other columns, or another number of rollouts, are another evaluation."""
    columns = "_".join(title(config, name) for name in made.evaluate)
    return plain(f"{row}-in-{columns}-k{k or config.eval.samples}")


def table(config: Config, made: Plan, root: Path, k: int | None) -> list[str]:
    """Markdown, from the cells that are done."""
    first = "after the supervised start" if config.train.sft is not None else "initial policy"
    rows = [(first, START), *((row_name(config, names), _cell_name(config, names)) for names in made.train)]
    lines = [f"| trained in | {' | '.join(title(config, name) for name in made.evaluate)} |", "|---|" + "---|" * len(made.evaluate)]
    base = _read(root / f"{_evaluation(config, made, START, k)}.json")
    for name, row in rows:
        found = _read(root / f"{_evaluation(config, made, row, k)}.json")
        cells = [_text(found, base if row != START else None, harness) for harness in made.evaluate]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _text(found: dict[str, Any] | None, base: dict[str, Any] | None, harness: str) -> str:
    passed = found["passed"].get(harness) if found is not None else None
    if found is None or not passed:
        return "–"
    rate = found["by_harness"].get(harness, found)
    text = f"{rate['pass@1']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]"
    compared = compare(passed, base["passed"].get(harness, {})) if base is not None else None
    if compared is not None:
        text += f" ({compared.difference.mean:+.3f}{'*' if compared.p < SURE else ''})"
    return text


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.is_file() else None
