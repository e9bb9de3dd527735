"""From recorded calls to what is trained: speed and size of the builders. `python -m benchmarks.trajectories`.

A Claude-Code-like session (`benchmarks.parts.sessions`: generated, 100 turns, 70k unique tokens, 3 sub-agents, 1 compaction, 5 retries) as
rows of the calls dataset becomes samples or a trie: Arrow in to Arrow out, credit included, on one core. The same with a chat template that
strips the reasoning of earlier replies. The baseline, in the same run, is the builder by the book on lists of Python integers
(`tests/reference_builders.py`), out of the same rows.

- call tokens: prompt + sampled of every call, as sent, the superseded ones too;
- training tokens: those of the rows, or of the trie;
- merged fully: rollouts that the chain makes one sample of, among a step of sessions of drawn shapes;
- memory: peak of a process of its own above what it held before, at one, two and four times the session's length.

Prints Markdown tables and a line per target; exit code 1 if one is missed and `--strict` is given.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.parts import sessions
from benchmarks.parts.figures import Verdict
from benchmarks.parts.sessions import Spoken

BUILDERS = ("per_call", "chain", "tree")
UNIQUE, TURNS = 70_000, 100
TARGET = 5e6
"""Call tokens per second of chain and tree."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trajectories", description="Speed and size of the builders.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, for trying")
    arguments = parser.parse_args()
    scale = 10 if arguments.quick else 1
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    figures: dict[str, Any] = {}
    for name, stripped in (("session", False), ("session, reasoning stripped", True)):
        figures[name] = of_session(sessions.claude_code(unique=UNIQUE // scale, turns=TURNS // scale, stripped=stripped))
        print(speeds(name, figures[name]))
    figures["merged fully"] = merged_fully(8 if arguments.quick else 32)
    print(f"Merged fully by chain, of a step of sessions of drawn shapes: {figures['merged fully']:.0%}\n")
    os.sched_setaffinity(0, cores)
    figures["memory"] = {name: [memory(name, UNIQUE // scale * k, TURNS // scale * k) for k in (1, 2, 4)] for name in ("chain", "tree")}
    print(memories(figures["memory"]))
    targets = verdicts(figures)
    print("\n".join(map(str, targets)))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(arguments.strict and not all(target.met for target in targets))


def of_session(session: list[Spoken]) -> dict[str, Any]:
    """Figures of each builder on one session."""
    from forge_ray.trajectories.split import flat

    table = sessions.table([session])
    sent = sum(call.prompt + len(call.ids) for call in session)
    figures: dict[str, Any] = {"calls": len(session), "call_tokens": sent}
    for name in BUILDERS:
        built, seconds = timed(lambda name=name: build(table, name))
        lists, naive = timed(lambda name=name: by_the_book(table, name), rounds=3)
        assert lists == len(flat(built, "ids")), f"{name}: {lists} tokens by the book, {len(flat(built, 'ids'))} of the builder"
        figures[name] = {
            "tokens_per_s": sent / seconds,
            "baseline_tokens_per_s": sent / naive,
            "training_tokens": lists,
            "rows": built.num_rows,
        }
    return figures


def build(table: pa.Table, name: str) -> pa.Table:
    """What a run does with the calls of a step: rows of the calls dataset to the rows that are trained."""
    from forge_ray.trajectories import builders, credit
    from forge_ray.trajectories.trajectory import Share, of_table

    made = of_table(table)
    for one in made:
        one.shares = {ordinal: Share(given.discount, given.weight) for ordinal, given in credit.assign(one.calls).items()}
    return builders.build(name, made)


def by_the_book(table: pa.Table, name: str) -> int:
    """The builder on lists, out of the same rows into Arrow lists (a trie stays Python nodes); its training tokens."""
    from forge_ray.trajectories.store import calls as stored
    from tests import reference_builders

    calls = stored.calls(table, "train")
    chosen = [ordinal for ordinal, call in enumerate(calls) if call.trainable]
    if name == "tree":
        return _size(reference_builders.tree([(calls, chosen)]))
    samples = getattr(reference_builders, name)(calls, chosen)
    columns = {field: pa.array([getattr(sample, field) for sample in samples]) for field in reference_builders.Sample.__dataclass_fields__}
    return len(pa.table(columns)["ids"].combine_chunks().values)


def merged_fully(rollouts: int) -> float:
    """Share of the rollouts of a step that the chain makes one sample of."""
    from forge_ray.trajectories import credit
    from forge_ray.trajectories.builders import chain
    from forge_ray.trajectories.trajectory import Share, of_table

    rng = np.random.default_rng(1)
    step = [
        sessions.claude_code(
            seed,
            unique=int(rng.integers(20_000, 70_000)),
            turns=int(rng.integers(10, 80)),
            agents=int(rng.poisson(0.7)),
            compactions=int(rng.random() < 0.3),
            retries=int(rng.integers(0, 4)),
        )
        for seed in range(rollouts)
    ]
    merged = 0
    for one in of_table(sessions.table(step)):
        one.shares = {ordinal: Share(1.0, given.weight) for ordinal, given in credit.assign(one.calls).items()}
        merged += len(chain.merged(one)) == 1
    return merged / rollouts


def memory(name: str, unique: int, turns: int) -> dict[str, float]:
    """Peak bytes of building one session in a fresh process, above what the process held with the table read."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (name, unique, turns))


def speeds(name: str, figures: dict[str, Any]) -> str:
    lines = [
        f"## {name}: {figures['calls']} calls, {figures['call_tokens']:,} call tokens",
        "",
        "| builder | call tokens/s | by the book | ratio | rows | training tokens | of per_call |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for builder in BUILDERS:
        one = figures[builder]
        ratio, share = one["tokens_per_s"] / one["baseline_tokens_per_s"], one["training_tokens"] / figures["per_call"]["training_tokens"]
        lines.append(
            f"| {builder} | {one['tokens_per_s'] / 1e6:.1f} M | {one['baseline_tokens_per_s'] / 1e6:.2f} M | {ratio:.0f} | {one['rows']} "
            f"| {one['training_tokens']:,} | {share:.3f} |"
        )
    return "\n".join([*lines, ""])


def memories(figures: dict[str, list[dict[str, float]]]) -> str:
    lines = ["## memory", "", "| builder | unique tokens | call tokens | peak MB | bytes per unique token |", "|---|---:|---:|---:|---:|"]
    for builder, rows in figures.items():
        for row in rows:
            numbers = f"{row['unique']:,.0f} | {row['call_tokens']:,.0f} | {row['peak'] / 1e6:.1f} | {row['peak'] / row['unique']:.0f}"
            lines.append(f"| {builder} | {numbers} |")
    return "\n".join([*lines, ""])


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found = []
    for name in ("session", "session, reasoning stripped"):
        for builder in ("chain", "tree"):
            rate = figures[name][builder]["tokens_per_s"]
            found.append(Verdict(f"{name}, {builder}: nanoseconds per call token", 1e9 / rate, 1e9 / TARGET, "ns"))
        sizes = [figures[name][builder]["training_tokens"] for builder in reversed(BUILDERS)]
        found.append(Verdict(f"{name}: training tokens, tree of chain", sizes[0] / sizes[1], 1.0, "x"))
        found.append(Verdict(f"{name}: training tokens, chain of per_call", sizes[1] / sizes[2], 1.0, "x"))
    for builder, rows in figures["memory"].items():
        growth = (rows[-1]["peak"] / rows[-1]["unique"]) / (rows[0]["peak"] / rows[0]["unique"])
        found.append(Verdict(f"{builder}: peak bytes per unique token, session of four times the length", growth, 1.5, "x"))
    return found


def timed(work: Callable[[], Any], *, rounds: int = 7) -> tuple[Any, float]:
    """What `work` gives, and the median of its seconds."""
    found, seconds = None, []
    for _ in range(rounds):
        started = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - started)
    return found, statistics.median(seconds)


def _measure(name: str, unique: int, turns: int) -> dict[str, float]:
    session = sessions.claude_code(unique=unique, turns=turns)
    table = sessions.table([session])
    build(sessions.table([sessions.claude_code(unique=1_000, turns=5)]), name)  # what is loaded on first use is not counted
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    built = build(table, name)
    peak = _status("VmHWM") - before
    sent = sum(call.prompt + len(call.ids) for call in session)
    return {"unique": sum(len(call.new) + len(call.ids) for call in session), "call_tokens": sent, "peak": peak, "rows": built.num_rows}


def _status(field: str) -> int:
    """A number of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _size(node: Any) -> int:
    count, stack = 0, [node]
    while stack:
        children = stack.pop().children.values()
        count += len(children)
        stack += children
    return count


if __name__ == "__main__":
    raise SystemExit(main())
