"""`forge-ray eval run.yaml --checkpoint C --k 4 [--against X]`: how often the held-out tasks are solved, and is that more than X does."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.cli.common import config_of
from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir, write_json

if TYPE_CHECKING:
    from forge_ray.config import Config
    from forge_ray.report.evaluation.summary import EvaluationSummary
    from forge_ray.rollout import RolloutRecord


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    if arguments.k is not None and arguments.k < 1:
        raise UserError(f"--k {arguments.k} is no number of rollouts", where="--k", fix="give at least 1")
    from forge_ray.cli.check import require

    require(config, training=False)
    from forge_ray.job import single
    from forge_ray.report.evaluation import comparison, text
    from forge_ray.report.evaluation.summary import outcomes_by_task

    model = single.checkpoint(config, arguments.checkpoint)
    against = stored(arguments.against) if arguments.against else None
    other = single.checkpoint(config, arguments.against, "--against") if arguments.against and against is None else None
    samples = arguments.k or config.eval.samples
    records, summary, directory = _evaluate(config, model, samples)
    if summary is None:
        print("held-out pass@1: no rollout ended with a reward")
        return 1
    tree: dict[str, Any] = {"checkpoint": str(model or "initial"), "run": str(directory.root), **summary.tree()}
    tree["passed"] = outcomes_by_task(records)
    if arguments.against:
        if against is None:
            against, _, _ = _evaluate(config, other, samples)
        compared = comparison.compare(outcomes_by_task(records), outcomes_by_task(against))
        print("\n".join(text.comparison_lines(arguments.checkpoint or "the initial policy", arguments.against, compared)))
        tree["against"] = {"what": arguments.against, **asdict(compared)} if compared else None
    write_json(directory.root / "evaluation.json", tree)
    if arguments.json:
        write_json(Path(arguments.json), tree)
    return 0


def stored(where: str) -> list[RolloutRecord] | None:
    """The rated rollouts of the last evaluation in a run directory; None where `where` is none. Raises `UserError` for one without."""
    from forge_ray.report.records import evaluations, read_records

    run = RunDir(Path(where).expanduser())
    if not run.rollouts.is_dir():
        return None
    found = evaluations(read_records(run))
    if not found:
        raise UserError(f"{where} holds no evaluation", where="--against", fix="give a run that was evaluated, or a checkpoint directory")
    return list(found.values())[-1]


def _evaluate(config: Config, model: Path | None, samples: int) -> tuple[list[RolloutRecord], EvaluationSummary | None, RunDir]:
    """Evaluate one checkpoint in a run directory of its own and print what came out; the rated rollouts with it."""
    from forge_ray.job import single
    from forge_ray.outcome import RATED
    from forge_ray.report.evaluation import text
    from forge_ray.report.evaluation.summary import summarize
    from forge_ray.report.records import outcomes
    from forge_ray.report.summary import write_summary

    config, directory = single.side_run(config, "eval")
    records = single.run_heldout(config, directory, samples, model)
    write_summary(directory)
    rated = [record for record in records if record.outcome in RATED]
    summary = summarize(rated)
    if summary is not None:
        print("\n".join(text.lines(summary)))
    print("outcomes: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes(records).items()))
    print(f"run directory: {directory.root}")
    return rated, summary, directory
