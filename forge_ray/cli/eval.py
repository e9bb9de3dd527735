"""`forge-ray eval run.yaml --checkpoint C --k 4 [--against X]`: how often the held-out tasks are solved, and is that more than X does."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.cli.common import config_of, run_directory
from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir, write_json

if TYPE_CHECKING:
    from forge_ray.job.heldout import Heldout
    from forge_ray.report.evaluation.summary import EvaluationSummary
    from forge_ray.rollout import RolloutRecord


def run(arguments: argparse.Namespace) -> int:
    if arguments.k is not None and arguments.k < 1:
        raise UserError(f"--k {arguments.k} is no number of rollouts", where="--k", fix="give at least 1")
    if not arguments.config and not arguments.resume:
        raise UserError("no config given", where="forge-ray eval", fix="give a run.yaml, or --resume RUN")
    if arguments.json and not os.access(Path(arguments.json).absolute().parent, os.W_OK):
        raise UserError(f"{arguments.json} cannot be written", where="--json", fix="give a file in a directory that is there")
    from forge_ray.cli.check import require
    from forge_ray.job import heldout, single
    from forge_ray.report.evaluation import comparison, text
    from forge_ray.report.evaluation.summary import outcomes_by_task

    begun = _taken_up(arguments) if arguments.resume else None
    config = begun.config if begun else config_of(arguments)
    require(config, training=False)
    model = begun.checkpoint if begun else single.checkpoint(config, arguments.checkpoint)
    samples = begun.samples if begun else arguments.k or config.eval.samples
    against = stored(arguments.against) if arguments.against else None
    other = single.checkpoint(config, arguments.against, "--against") if arguments.against and against is None else None
    begun = begun or heldout.begin(config, model, samples)
    resampled: bool = arguments.bootstrap
    records, summary = _evaluate(begun, resampled)
    if summary is None:
        print("held-out pass@1: no rollout ended with a reward")
        return 1
    tree: dict[str, Any] = {
        "checkpoint": str(model or "initial"),
        "run": str(begun.directory.root),
        "intervals": "bootstrap" if resampled else "wilson",
        **summary.tree(),
    }
    tree["passed"] = outcomes_by_task(records)
    write_json(begun.directory.root / "evaluation.json", tree)  # whatever becomes of the other side
    if arguments.against:
        if against is None:
            against, _ = _evaluate(heldout.begin(config, other, samples), resampled)
        compared = comparison.compare_harnesses(outcomes_by_task(records), outcomes_by_task(against), resampled=resampled)
        print("\n".join(text.comparison_lines(arguments.checkpoint or str(model or "the initial policy"), arguments.against, compared)))
        tree["against"] = {"what": arguments.against, **asdict(compared), "difference": compared.difference._asdict()} if compared else None
        write_json(begun.directory.root / "evaluation.json", tree)
    if arguments.json:
        write_json(Path(arguments.json), tree)
    return 0


def stored(where: str) -> list[RolloutRecord] | None:
    """The rated rollouts of the last evaluation in a run directory; None where `where` is none. Raises `UserError` for one without."""
    from forge_ray.report.records import evaluations, read_records

    run = RunDir(run_directory(where))
    if not run.rollouts.is_dir():
        return None
    found = evaluations(read_records(run))
    if not found:
        raise UserError(f"{where} holds no evaluation", where="--against", fix="give a run that was evaluated, or a checkpoint directory")
    return list(found.values())[-1]


def _taken_up(arguments: argparse.Namespace) -> Heldout:
    """The evaluation that `--resume` names."""
    if arguments.config or arguments.overrides or arguments.checkpoint or arguments.k is not None:
        fix = "leave out the config, the overrides, --checkpoint and --k"
        raise UserError("a resumed evaluation keeps its config, its checkpoint and its number of rollouts", where="--resume", fix=fix)
    from forge_ray.job import heldout

    return heldout.take_up(run_directory(arguments.resume))


def _evaluate(begun: Heldout, resampled: bool) -> tuple[list[RolloutRecord], EvaluationSummary | None]:
    """Run an evaluation and print what came out; the rated rollouts with it."""
    from forge_ray.outcome import RATED
    from forge_ray.report.evaluation import text
    from forge_ray.report.evaluation.summary import summarize
    from forge_ray.report.records import outcomes
    from forge_ray.report.summary import write_summary

    print(f"run directory: {begun.directory.root}", flush=True)
    try:
        records = begun.run()
    except KeyboardInterrupt:
        print(f"stopped; continue with: forge-ray eval --resume {begun.directory.root}", flush=True)
        raise
    write_summary(begun.directory)
    rated = [record for record in records if record.outcome in RATED]
    summary = summarize(rated, resampled=resampled)
    if summary is not None:
        print("\n".join(text.lines(summary)))
    print("outcomes: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes(records).items()))
    return rated, summary
