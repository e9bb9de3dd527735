"""Does what is learned in one harness help in another? Train-harness × eval-harness, in the form of OpenForgeRL's Table 5.

A row is a set of harnesses that the policy was trained in, all with the same config otherwise (the same steps and rollouts in all: a set
of three gives each a third); the first row is the initial policy. A column is a harness that it is evaluated in. In brackets: the
difference to the first row, paired by task, with a star where its 95 % interval does not hold 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ray.config import Config, Harness
from forge_ray.errors import UserError
from forge_ray.report.evaluation.comparison import compare
from forge_ray.study.cells import Evaluation, Training, plain


@dataclass(frozen=True)
class Plan:
    """Which harnesses are trained in together, and which are evaluated in."""

    train: tuple[tuple[str, ...], ...]
    evaluate: tuple[str, ...]


def plan(config: Config, train: str | None, evaluate: str | None) -> Plan:
    """From `a,b,a+b` and `a,b`; by default each harness alone and all together, evaluated in each. Raises `UserError`."""
    names = [harness.name for harness in config.harnesses]
    sets = (
        [tuple(part.split("+")) for part in train.split(",")]
        if train
        else [*((name,) for name in names), *([tuple(names)] if len(names) > 1 else [])]
    )
    columns = evaluate.split(",") if evaluate else names
    for where, given in (("--train", [name for part in sets for name in part]), ("--eval", columns)):
        for name in given:
            if name not in names:
                raise UserError(f"no harness {name!r}", where=where, fix=f"use those of the config: {', '.join(names)}")
    return Plan(tuple(sets), tuple(columns))


def harnesses(config: Config, names: Sequence[str]) -> str:
    """The override that leaves only these."""
    kept = [harness for harness in config.harnesses if harness.name in names]
    return f"harnesses={json.dumps([Harness.model_dump(harness, mode='json') for harness in kept])}"


def row_name(names: Sequence[str]) -> str:
    return "+".join(names)


def trainings(config: Config, made: Plan) -> list[Training]:
    """One cell for each set."""
    return [Training(f"trained-{plain(row_name(names))}"[:60], (harnesses(config, names),)) for names in made.train]


def evaluations(config: Config, made: Plan, root: Path, k: int | None) -> list[Evaluation]:
    """Every row in every column; call it when the trainings are done (it looks for their last checkpoints)."""
    checkpoints: list[tuple[str, str | None]] = [("initial", None)]
    for cell in trainings(config, made):
        saved = sorted((root / cell.name / "checkpoints").glob("step-*"))
        if not saved:
            raise UserError(
                f"{root / cell.name} has no checkpoint", where="forge-ray transfer", fix="remove that directory and start again"
            )
        checkpoints.append((cell.name, str(saved[-1])))
    return [
        Evaluation(f"{row}-in-{plain(name)}", checkpoint, (harnesses(config, (name,)),), k)
        for row, checkpoint in checkpoints
        for name in made.evaluate
    ]


def table(config: Config, made: Plan, root: Path) -> list[str]:
    """Markdown, from the cells' files."""
    rows = [
        ("initial policy", "initial"),
        *((row_name(names), cell.name) for names, cell in zip(made.train, trainings(config, made), strict=True)),
    ]
    lines = [f"| trained in | {' | '.join(made.evaluate)} |", "|---|" + "---|" * len(made.evaluate)]
    base = {name: _read(root, "initial", name) for name in made.evaluate}
    for title, row in rows:
        cells = []
        for name in made.evaluate:
            found = _read(root, row, name)
            text = f"{found['pass@1']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
            compared = compare(found["passed"], base[name]["passed"]) if row != "initial" else None
            if compared is not None:
                sure = compared.difference.low > 0 or compared.difference.high < 0
                text += f" ({compared.difference.mean:+.3f}{'*' if sure else ''})"
            cells.append(text)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def _read(root: Path, row: str, harness: str) -> dict[str, Any]:
    return json.loads((root / f"{row}-in-{plain(harness)}.json").read_text())
