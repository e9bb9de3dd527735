"""What asynchrony gains: step time and idle shares by staleness bound, on a virtual clock. `python -m benchmarks.async`.

The run's own scheduler, admission and choice at consumption (`job/flow.py`) between a simulated harness and a simulated trainer: 64
places, 8 groups of 8 rollouts a step, rollout times lognormal with sigma 0.5, and waiting for the agents is 91 % of a synchronous step,
which is what LEGO-RL reports of SWE-bench. Every setting sees the same rollouts, which take the same times. Staleness is measured on the
trained tokens at consumption. Figures are means over the seeds; times are in medians of a rollout.

`x` is the step time of bound 0 over that of the row. Exit code 1 if no bound up to 2 reaches 2.5.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from benchmarks.parts.virtual_run import Result, VirtualRun, settings, synchronous_share

BOUNDS, SHARE, TARGET, TARGET_BOUND = (0, 1, 2, 4, 8), 0.91, 2.5, 2
WARM = TAIL = 10
"""Steps at both ends that are left out: the places fill, and nothing new is started."""
COLUMNS = ("step", "trainer_idle", "slots_idle", "staleness_max", "staleness_mean", "dropped", "held")
Figures = dict[str, dict[str, float]]


def measure(seeds: int, steps: int) -> Figures:
    """Setting -> figures."""
    figures: Figures = {}
    for on_stale in ("wait", "drop"):
        for bound in BOUNDS:
            if bound == 0 and on_stale == "drop":
                continue  # one step's groups at a time: nothing can be too old
            results: list[Result] = []
            for seed in range(seeds):
                train = synchronous_share(seed, steps, SHARE)
                config = settings(bound=bound, on_stale=on_stale, steps=steps, seed=seed)
                results.append(VirtualRun(config, train=train).run().result(WARM, TAIL))
            row = {name: fmean(asdict(result)[name] for result in results) for name in COLUMNS}
            row["staleness_max"] = max(result.staleness_max for result in results)
            figures["synchronous" if bound == 0 else f"{on_stale} {bound}"] = row
    base = figures["synchronous"]["step"]
    for row in figures.values():
        row["x"] = base / row["step"]
    return figures


def table(figures: Figures) -> str:
    """The figures, as Markdown."""
    lines = [
        "| bound | step | x | trainer idle | places idle | staleness max | mean | groups dropped | steps held |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in figures.items():
        lines.append(
            f"| {name} | {row['step']:.2f} | {row['x']:.2f} | {row['trainer_idle']:.0%} | {abs(row['slots_idle']):.0%} | "
            f"{row['staleness_max']:.0f} | {row['staleness_mean']:.2f} | {row['dropped']:.1%} | {row['held']:.0%} |"
        )
    return "\n".join(lines)


def reached(figures: Figures) -> float:
    """The best factor with a staleness, as measured, of at most `TARGET_BOUND`."""
    return max(row["x"] for row in figures.values() if row["staleness_max"] <= TARGET_BOUND)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="one seed, 30 steps")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures = measure(1, 30) if options.quick else measure(options.seeds, options.steps)
    print(table(figures))
    factor = reached(figures)
    print(f"\n{factor:.2f} times the steps of synchronous training at a measured staleness of at most {TARGET_BOUND} (target: {TARGET})")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if factor >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
