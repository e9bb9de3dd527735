"""The three learning seeds: `make bench`. Runs the quickstart once per seed, measures time and memory, and says whether it learned.

Prints a Markdown table. Exit code 1 if a seed misses a bound: held-out pass@1 under 0.4 after SFT and over 0.8 after training, within 6
minutes, with at most 10 GiB of memory. Memory is the proportional set size of all processes of the run, sampled every 5 seconds;
the processes are found by a variable in their environment, so that detached ones count too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "FORGE_RAY_BENCH"
BEFORE, AFTER, SECONDS, GIB = 0.4, 0.8, 360.0, 10.0


@dataclass
class Result:
    """One seed's run."""

    seed: int
    code: int
    seconds: float
    peak_gib: float
    summary: dict

    def row(self) -> str:
        cells = [str(self.seed)]
        for label in ("before", "after"):
            rate = self.summary.get("heldout", {}).get(label)
            cells.append(f"{rate['pass@1']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]" if rate else "–")
        cells += [str(self.summary.get("steps", "–")), f"{self.seconds:.0f}", f"{self.peak_gib:.1f}"]
        return "| " + " | ".join(cells) + " |"

    def figures(self) -> dict[str, float]:
        """The run's figures by name."""
        heldout = self.summary.get("heldout", {})
        rates = {f"seed{self.seed}.{label}.pass@1": heldout[label]["pass@1"] for label in ("before", "after") if heldout.get(label)}
        gain = {}
        if len(rates) == 2 and heldout["before"]["pass@1"]:
            gain = {f"seed{self.seed}.after/before": heldout["after"]["pass@1"] / heldout["before"]["pass@1"]}
        return {**rates, **gain, f"seed{self.seed}.seconds": self.seconds, f"seed{self.seed}.peak_gib": self.peak_gib}

    def misses(self) -> list[str]:
        """The bounds that this run misses."""
        if self.code:
            return [f"exit code {self.code}"]
        heldout = self.summary.get("heldout", {})
        before, after = heldout.get("before"), heldout.get("after")
        if not before or not after:
            return ["an evaluation is missing"]
        found = []
        if before["pass@1"] >= BEFORE:
            found.append(f"pass@1 after SFT is not under {BEFORE}")
        if after["pass@1"] <= AFTER:
            found.append(f"pass@1 after training is not over {AFTER}")
        if self.seconds > SECONDS:
            found.append(f"took longer than {SECONDS:.0f} s")
        if self.peak_gib > GIB:
            found.append(f"used more than {GIB:.0f} GiB")
        return found


def marked(value: str, known: dict[tuple[int, bytes], bool]) -> list[int]:
    """Ids of the processes that have `MARK=value` in their environment. `known` remembers who was looked at."""
    wanted = f"{MARK}={value}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            started = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[19]
            identity = (int(entry.name), started)
            if identity not in known:
                known[identity] = wanted in Path(entry.path, "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue  # it ended, or is not ours to look at
        if known[identity]:
            found.append(identity[0])
    return found


def pss_gib(pids: list[int]) -> float:
    """Proportional set size of the processes, GiB."""
    kib = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kib += int(line.split()[1])
        except OSError:
            continue
    return kib / 2**20


def run(seed: int, config: Path, runs: Path, overrides: list[str]) -> Result:
    """One run, to its end."""
    name, mark = f"bench-seed-{seed}-{time.strftime('%Y%m%d-%H%M%S')}", uuid.uuid4().hex
    command = [sys.executable, "-m", "forge_ray.cli.main", "train", str(config), f"name={name}", f"seed={seed}", f"runs={runs}", *overrides]
    known: dict[tuple[int, bytes], bool] = {}
    started, peak = time.monotonic(), 0.0
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: mark})
    while True:
        try:
            code = process.wait(timeout=5)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, pss_gib(marked(mark, known)))
    seconds = time.monotonic() - started
    file = runs / name / "summary.json"
    return Result(seed, code, seconds, peak, json.loads(file.read_text()) if file.is_file() else {})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds", description="Train the quickstart with several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "quickstart" / "run.yaml")
    parser.add_argument("--runs", type=Path, default=Path.home() / "forge-ray-runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures by name")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    results = [run(seed, given.config, given.runs.resolve(), given.overrides) for seed in given.seeds]
    print("\n| seed | pass@1 after SFT | after GRPO | steps | seconds in all | peak GiB |\n|---|---|---|---|---|---|")
    for result in results:
        print(result.row())
    if given.json:
        given.json.write_text(json.dumps({name: value for result in results for name, value in result.figures().items()}, indent=2) + "\n")
    misses = {result.seed: result.misses() for result in results if result.misses()}
    for seed, found in misses.items():
        print(f"seed {seed}: {', '.join(found)}")
    return 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
