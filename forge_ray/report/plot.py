"""A picture (PNG) of the reward curves of one or more runs: `python -m forge_ray.report.plot RUN_DIRECTORY … --out reward.png`.

Lines are the training reward, points the held-out pass@1 with its 95 % interval. White ground, so that it reads on any page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from forge_ray.report.metrics import read_metrics
from forge_ray.report.records import evaluation_points, evaluations, read_records
from forge_ray.report.summary import read_config
from forge_ray.run_dir import RunDir

COLOURS = ("#2563c9", "#c2410c", "#15803d", "#7c3aed", "#b45309", "#0e7490")


def plot_rewards(runs: Sequence[RunDir], out: Path, *, title: str = "") -> Path:
    """Write the picture to `out` and return it. A single run shows the band around its reward; several are told apart by seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.0), dpi=160, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        colour, steps = COLOURS[index % len(COLOURS)], [step for step in read_metrics(run.metrics) if step.reward_mean is not None]
        name = f"seed {read_config(run).get('seed', 0)}: " if len(runs) > 1 else ""
        x, y = [step.step for step in steps], [step.reward_mean or 0.0 for step in steps]
        axes.plot(x, y, color=colour, linewidth=1.8, label=f"{name}training reward")
        if len(runs) == 1:
            half = [step.reward_ci or 0.0 for step in steps]
            low, high = [m - h for m, h in zip(y, half, strict=True)], [m + h for m, h in zip(y, half, strict=True)]
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        points = evaluation_points(run, evaluations(read_records(run, "eval-*")))
        # Side by side, where several runs were evaluated at the same step.
        at = [step + 0.12 * (index - (len(runs) - 1) / 2) for step, _ in points]
        rates = [rate for _, rate in points]
        errors = [[rate.pass_at_1 - rate.low for rate in rates], [rate.high - rate.pass_at_1 for rate in rates]]
        shown = colour if len(runs) > 1 else COLOURS[1]
        values = [rate.pass_at_1 for rate in rates]
        axes.errorbar(at, values, yerr=errors, fmt="o", color=shown, markersize=6, elinewidth=1.6, label=f"{name}held-out pass@1")
    axes.set(xlabel="training step", ylabel="reward", ylim=(0, 1.03), title=title)
    axes.grid(axis="y", color="#dfe4ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    if runs:
        axes.legend(frameon=False, fontsize=9, loc="lower right", ncols=1 if len(runs) == 1 else 2)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m forge_ray.report.plot", description="Draw the reward curves of runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("--out", type=Path, default=Path("reward.png"))
    parser.add_argument("--title", default="")
    given = parser.parse_args(arguments)
    for run in given.runs:
        if not (run / "metrics.jsonl").is_file():
            parser.error(f"{run} is no run directory: it has no metrics.jsonl")
    print(plot_rewards([RunDir(run) for run in given.runs], given.out, title=given.title))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
