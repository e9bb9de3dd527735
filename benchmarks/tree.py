"""Forward and backward of one step: call by call, chains, a trie, a trie in pieces. `python -m benchmarks.tree`.

Generated sessions (`benchmarks.parts.sessions`): a Claude-Code-like one scaled to 8k unique tokens, the same with a chat template that
strips the reasoning of earlier replies, one that branches into sub-agents, and a step of 64 rollouts of 8 tasks that share a prompt of 2k
tokens. Models: Qwen3 with random weights, tiny (0.55 M) and mid (29 M), float32, GRPO's loss. The code is the learner's own (`Rows`,
packed, and `Tries`); all but the whole trie may have as many tokens' activations alive as the longest call has, or 2,048.

- seconds: of all forward and backward passes of the step, without the optimizer, the median of several in turns where that is short;
  `~`: of a share of the rows, scaled by tokens;
- extra MB: peak of the process above what model and gradients take;
- ratio: call by call = 1, in the same run;
- gradients: ‖Δg‖ / ‖g‖ of the trie in pieces to call by call, or to the whole trie (`*`) where all calls would take minutes.

Prints Markdown tables and a line per target; exit code 1 if one is missed and `--strict` is given.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parts import sessions
from benchmarks.parts.figures import Verdict
from benchmarks.parts.sessions import Spoken

METHODS = ("per call", "chain", "tree", "tree in pieces")
BUILDERS = {"per call": "per_call", "chain": "chain", "tree": "tree", "tree in pieces": "tree"}
SESSION, STRIPPED, AGENTS, GROUP = "session, 8k", "session, 8k, reasoning stripped", "sub-agents", "64 rollouts, one prompt"
CASES = (SESSION, STRIPPED, AGENTS, GROUP)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 2_000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32, "intermediate_size": 256},
    "mid": {"vocab_size": 8_000, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "intermediate_size": 1_536},
}  # fmt: skip
AT_MOST = {"tiny": 160_000, "mid": 8_000}
"""Tokens of rows that are run; of more a share is run and scaled."""
AT_ONCE = 2_048
LONG_S, SHORT_S = 20.0, 4.0
"""A pass that takes less than the first is run twice, then until its runs have taken the second."""
MEMORY, GROUP_SPEED = 3.0, 10.0
"""Bounds: pieces' extra memory in units of call by call's; its speed on 64 rollouts."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="the tiny model and small sessions, for trying")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--cases", nargs="+", choices=range(len(CASES)), type=int, default=range(len(CASES)), help="numbers; default: all")
    parser.add_argument("--threads", type=int, default=2, help="of torch; default 2")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    figures: dict[str, Any] = {"tokens of the full session": full_session(10 if arguments.quick else 1)}
    print(token_table(figures["tokens of the full session"]))
    targets: list[Verdict] = []
    for model in ["tiny"] if arguments.quick else arguments.models:
        for case in (CASES[number] for number in arguments.cases):
            found = measure(case, model, arguments.quick)
            figures[f"{model}, {case}"] = found
            print(table(f"{model}, {case}", found), flush=True)
            targets += verdicts(f"{model}, {case}", case, found)
    print("\n".join(map(str, targets)))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(arguments.strict and not all(target.met for target in targets))


def step_of(case: str, vocabulary: int, quick: bool) -> list[list[Spoken]]:
    """The sessions of one step."""
    if case == GROUP:
        return sessions.group(tasks=2 if quick else 8, rollouts=4 if quick else 8, vocabulary=vocabulary)
    if case == AGENTS:
        return [sessions.subagents(vocabulary=vocabulary)]
    unique, turns = (2_000, 12) if quick else (8_000, 40)
    return [sessions.claude_code(unique=unique, turns=turns, retries=2, stripped=case == STRIPPED, vocabulary=vocabulary)]


def built(step: list[list[Spoken]], builder: str) -> Any:
    """The step's table, by a builder, as a run makes it."""
    from forge_ray.trajectories import builders, credit
    from forge_ray.trajectories.trajectory import Share, of_table

    made = of_table(sessions.table(step))
    for number, one in enumerate(made):
        advantage = 1.0 - number % 3
        one.shares = {ordinal: Share(advantage or 0.5, given.weight) for ordinal, given in credit.assign(one.calls).items()}
    return builders.build(builder, made)


def full_session(scale: int) -> dict[str, dict[str, int]]:
    """Tokens that each builder's forward passes compute, of the session at its full size."""
    from forge_ray.trajectories.split import tokens

    found = {}
    for name, stripped in (("full session", False), ("full session, reasoning stripped", True)):
        step = [sessions.claude_code(unique=70_000 // scale, turns=100 // scale, stripped=stripped)]
        found[name] = {builder: tokens(built(step, builder))[0] for builder in ("per_call", "chain", "tree")}
    return found


@dataclass(frozen=True)
class Run:
    """What is run of a case by one method."""

    part: Any
    tokens: int
    share: float
    """Tokens that are run, of all."""


def plan(case: str, model: str, quick: bool) -> tuple[dict[str, Run], int]:
    """By method; and the tokens whose activations may be alive."""
    from forge_ray.train_loop import forward
    from forge_ray.train_loop.rows import Rows
    from forge_ray.train_loop.tree.forest import forest
    from forge_ray.train_loop.tree.tries import Tries

    step = step_of(case, SHAPES[model]["vocab_size"], quick)
    found: dict[str, Run] = {}
    budget = 0
    for method in ("per call", "chain"):
        rows = sorted(forward.rows(built(step, BUILDERS[method])), key=len)
        budget = budget or max(AT_ONCE, len(rows[-1]))
        count = sum(map(len, rows))
        some = rows[:: max(1, round(count / AT_MOST[model]))][::-1]
        found[method] = Run(Rows(some), count, sum(map(len, some)) / count)
    one = forest(built(step, "tree"))
    found["tree"] = Run(Tries(one, len(one)), len(one), 1.0)
    found["tree in pieces"] = Run(Tries(one, budget), len(one), 1.0)
    return found, budget


def measure(case: str, model: str, quick: bool) -> dict[str, Any]:
    """Figures of each method."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from forge_ray.train_loop import attention
    from forge_ray.train_loop.part import Passes

    torch.manual_seed(0)
    net: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPES[model], tie_word_embeddings=True, max_position_embeddings=32_768)).train()
    attention.use(net)
    runs, budget = plan(case, model, quick)
    passes = Passes(torch.device("cpu"), budget, packed=True)
    for run in runs.values():  # what is made on first use, and the gradients, are not counted
        _pass(net, _little(run.part), passes)
    found: dict[str, Any] = {"budget": budget}
    gradients: dict[str, list[torch.Tensor]] = {}
    seconds: dict[str, list[float]] = {method: [] for method in runs}
    for method, run in runs.items():
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        seconds[method].append(_timed(net, run.part, passes))
        found[method] = {"extrapolated": run.share < 1, "extra_bytes": _status("VmHWM") - before, "tokens": run.tokens}
        gradients[method] = [] if run.share < 1 else [weight.grad.clone() for weight in net.parameters()]
    while short := [method for method, took in seconds.items() if _again(took)]:  # in turns: the machine is not the same all the time
        for method in short:
            seconds[method].append(_timed(net, runs[method].part, passes))
    for method, took in seconds.items():
        found[method]["seconds"] = statistics.median(took) / runs[method].share
    found["one piece"] = len(runs["tree"].part.forest) <= budget
    base = "per call" if gradients["per call"] else "tree"
    found["gradients"] = {"of": base, "distance": _distance(gradients["tree in pieces"], gradients[base])}
    return found


def _again(took: list[float]) -> bool:
    return sum(took) < SHORT_S or (len(took) == 1 and took[0] < LONG_S)


def _timed(net: Any, part: Any, passes: Any) -> float:
    net.zero_grad(set_to_none=False)
    began = time.perf_counter()
    _pass(net, part, passes)
    return time.perf_counter() - began


def _pass(net: Any, part: Any, passes: Any) -> None:
    from forge_ray.config import Loss
    from forge_ray.train_loop.losses import policy_loss
    from forge_ray.train_loop.part import Work

    total = part.total()
    part.accumulate(
        Work(
            module=net,
            passes=passes,
            loss=lambda inputs: policy_loss(Loss(), inputs, total)[0],
            backward=lambda share, last: share.backward(),
            step=3,
            entropy_gradient=False,
        )
    )


def _little(part: Any) -> Any:
    """A few tokens of a part."""
    return type(part)(part.rows[-1:]) if hasattr(part, "rows") else part.sampled_by(int(part.steps[0]), 1)


def _distance(one: list[Any], other: list[Any]) -> float:
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(one, other, strict=True))
    return (apart / sum(float(b.double().square().sum()) for b in other)) ** 0.5


def _status(field: str) -> int:
    """A number of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def token_table(found: dict[str, dict[str, int]]) -> str:
    lines = ["", "| tokens computed | per call | chain | tree |", "|---|---|---|---|"]
    lines += [f"| {name} | {row['per_call']:,} | {row['chain']:,} | {row['tree']:,} |" for name, row in found.items()]
    return "\n".join([*lines, ""])


def table(name: str, found: dict[str, Any]) -> str:
    lines = [f"| {name} | tokens | seconds | ratio | extra MB | ratio |", "|---|---|---|---|---|---|"]
    base = found["per call"]
    for method in METHODS:
        one = found[method]
        seconds = f"{'~' if one['extrapolated'] else ''}{one['seconds']:.2f}"
        ratios = [one[key] / max(1e-9, base[key]) for key in ("seconds", "extra_bytes")]
        lines.append(f"| {method} | {one['tokens']:,} | {seconds} | {ratios[0]:.3f} | {one['extra_bytes'] / 1e6:.0f} | {ratios[1]:.2f} |")
    told = found["gradients"]
    lines.append(f"\nGradients: {told['distance']:.1e}{'' if told['of'] == 'per call' else '*'}; {found['budget']:,} tokens at once.\n")
    return "\n".join(lines)


def verdicts(name: str, case: str, found: dict[str, Any]) -> list[Verdict]:
    base, pieces = found["per call"], found["tree in pieces"]
    # A trie that fits is one piece: the same thing twice.
    others = min(found[method]["seconds"] for method in METHODS[: 2 if found["one piece"] else 3])
    told = [
        Verdict(f"{name}: time of pieces, of the least of the others", pieces["seconds"] / others, 1.0, "x"),
        Verdict(f"{name}: extra memory of pieces, of per call's", pieces["extra_bytes"] / max(1, base["extra_bytes"]), MEMORY, "x"),
        Verdict(f"{name}: gradients", found["gradients"]["distance"] * 1e5, 1.0, "1e-5"),
    ]
    if case == GROUP:
        told.append(Verdict(f"{name}: time of pieces, of per call's", pieces["seconds"] / base["seconds"], 1 / GROUP_SPEED, "x"))
    return told


if __name__ == "__main__":
    raise SystemExit(main())
