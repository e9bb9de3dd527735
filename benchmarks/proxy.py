"""What recording costs: the proxy against vLLM's app without it, Serve's own floor, and a gateway. `python -m benchmarks.proxy`.

Same machine, same run, the scripted engine behind all, turn and turn about:

- bare: vLLM's app under uvicorn, neither edge nor engine tap;
- floor: the same app in a Serve replica behind HAProxy; what it takes beyond bare is Serve's own;
- ours: the recording proxy there, its call log synced to disk as in a run;
- default: the same through Serve's default proxy;
- litellm: LiteLLM's proxy in front of bare (installed in an environment of its own, outside the checkout).

Conversations grow by a reply of 64 tokens and a message with each call, so a call brings few new tokens whatever its history. CPU is
that of all processes that serve. The first rows are the same comparison without Serve or sockets, bare and recorded in one process.
Prints Markdown tables and a line per target; exit code 1 if one is missed and `--strict` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parts.asgi import token
from benchmarks.parts.conversation import NEXT, REPLY_TOKENS, Words
from benchmarks.parts.figures import Measured, Verdict, against_gateway, cpu_seconds, growth, spent, verdicts
from benchmarks.parts.processes import Child, Servers, free_ports
from forge_ray.errors import UserError
from forge_ray.harnesses.install.python import PythonPackage
from tests.tiny_model import tiny_model

SIZES = {"1k": 1_000, "32k": 32_000, "128k": 128_000}
CONCURRENCY = (1, 16, 64)
LITELLM = PythonPackage("litellm", "1.106.12", also=("litellm[proxy]==1.106.12",))
KEY = "sk-0123456789abcdef0123456789abcdef"
"""LiteLLM does not start without one; ours checks one too."""
NAMES = ("bare", "floor", "ours", "default", "litellm")
"""In the order of the columns."""


@dataclass(frozen=True)
class Cell:
    """One kind of load."""

    size: str
    streamed: bool
    concurrency: int

    @property
    def name(self) -> str:
        return f"{'streamed' if self.streamed else 'unary'}, {self.size}, {self.concurrency} at a time"


def plan(quick: bool) -> dict[Cell, int]:
    """Calls per server and round of each kind of load. A long prompt takes a tenth of a second to tokenise, so it gets few."""
    calls = {("1k", 1): 400, ("1k", 16): 128, ("1k", 64): 640, ("32k", 1): 24, ("32k", 16): 48, ("32k", 64): 64}
    calls |= {("128k", 1): 8, ("128k", 16): 16, ("128k", 64): 64}
    if quick:
        calls = {("1k", 1): 60, ("1k", 16): 96, ("32k", 1): 10}
    return {Cell(size, streamed, many): n for (size, many), n in calls.items() for streamed in (False, True)}


def skipped(server: str, cell: Cell) -> bool:
    """The two that only set our figures beside theirs are left out where a single cell would take a minute."""
    return server in ("default", "litellm") and cell.size == "128k" and cell.concurrency == 64


def inside(words: Path, model: Path, quick: bool) -> list[dict[str, Any]]:
    """The rows without Serve."""
    calls = {"1k": 160, "32k": 16} if quick else {"1k": 320, "32k": 64, "128k": 32}
    spec = json.dumps({"words": str(words), "model": str(model), "plan": calls})
    done = subprocess.run([sys.executable, "-m", "benchmarks.parts.inside", spec], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure(servers: Servers, load: Child, cells: dict[Cell, int], rounds: int, new_tokens: int) -> dict[tuple[str, Cell], Measured]:
    """Every cell on every server, by turns."""
    found: dict[tuple[str, Cell], Measured] = {}
    for cell, calls in cells.items():
        for turn in range(rounds):
            for server in servers.names if turn % 2 else servers.names[::-1]:
                if skipped(server, cell):
                    continue
                logged, before = servers.log_bytes(server), cpu_seconds(servers.pids(server))
                order = {"server": server, "size": cell.size, "streamed": cell.streamed, "concurrency": cell.concurrency, "calls": calls}
                answer = load.ask(order)
                cpu = spent(before, cpu_seconds(servers.pids(server)))
                one = Measured(**answer, cpu_s=cpu, log_bytes=servers.log_bytes(server) - logged, new_tokens=calls * new_tokens)
                found[server, cell] = found[server, cell].plus(one) if (server, cell) in found else one
        print(f"  {cell.name}", file=sys.stderr, flush=True)
    return found


@contextmanager
def everything(directory: Path, words: Path, model: Path, litellm: bool) -> Iterator[tuple[Servers, Child]]:
    """All servers and the load generator."""
    with ExitStack() as stack:
        servers = Servers()
        load = stack.enter_context(Child("load", [sys.executable, "-m", "benchmarks.parts.load", str(words)]))
        ports = free_ports()
        spec = {"words": str(words), "model": str(model), "port": ports[0]}
        bare = stack.enter_context(Child("bare", [sys.executable, "-m", "benchmarks.parts.bare", json.dumps(spec)]))
        bare.line()
        servers.add("bare", f"http://127.0.0.1:{ports[0]}", [bare.pid])
        for name, port in (("ours", ports[1]), ("default", ports[2])):
            spec = {"words": str(words), "model": str(model), "port": port, "haproxy": name == "ours"}
            mark = f"{name}-{os.getpid()}"
            cluster = stack.enter_context(Child(name, [sys.executable, "-m", "benchmarks.parts.served", json.dumps(spec)], mark=mark))
            told = json.loads(cluster.line())
            servers.add(name, told["base"], mark=mark, deployment="policy", calls=Path(told["calls"]))
            if name == "ours":
                servers.add("floor", told["base"], mark=mark, deployment="floor")
        if litellm:
            servers.add("litellm", *_litellm(stack, directory, servers.base("bare"), ports[3], bare.pid))
        servers.names = [name for name in NAMES if name in servers.names]
        yield servers, load


def _litellm(stack: ExitStack, directory: Path, base: str, port: int, bare: int) -> tuple[str, list[int]]:
    """LiteLLM's proxy with one worker, logging off; its base URL and the processes that serve."""
    config = directory / "litellm.yaml"
    model = {"model": "openai/policy", "api_base": f"{base}/v1", "api_key": "none"}
    settings = {"num_retries": 0, "telemetry": False, "request_timeout": 600}
    config.write_text(json.dumps({"model_list": [{"model_name": "policy", "litellm_params": model}], "litellm_settings": settings}))
    script = "import sys; from litellm import run_server; sys.exit(run_server())"
    command = [str(LITELLM.executable), "-c", script, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
    child = stack.enter_context(Child("litellm", command, environment=environment, quiet=True))
    child.wait_for_port(port)
    return f"http://127.0.0.1:{port}", [child.pid, bare]


def begin(servers: Servers, load: Child, size: str, sessions: int) -> None:
    """The conversations of one size, with every server: the first call of each brings the whole history and is not measured."""
    for server in servers.names:
        names = [f"{size}-{at}" for at in range(sessions)]
        route = "/v1/chat/completions"
        prefix = {"floor": ["/floor"] * sessions}.get(server) or [f"/s/{token(name)}" for name in names]
        paths = [f"{before if server not in ('bare', 'litellm') else ''}{route}" for before in prefix]
        headers = f"authorization: Bearer {KEY}\r\n" if server == "litellm" else ""
        load.ask({"name": server, "size": size, "base": servers.base(server), "paths": paths, "headers": headers})
        load.ask({"server": server, "size": size, "streamed": False, "concurrency": min(sessions, 8), "calls": sessions})


def table(found: dict[tuple[str, Cell], Measured], names: list[str]) -> Iterator[str]:
    """Markdown: a row per kind of load, a column per server."""
    for title, cell_of in (
        ("p50 / p95, ms", lambda m: f"{m.p50:.1f} / {m.p95:.1f}"),
        ("time to first byte (median), ms", lambda m: f"{m.ttft:.1f}"),
        ("CPU per call, ms", lambda m: f"{m.cpu:.1f}"),
    ):
        yield f"\n| {title} | {' | '.join(names)} | ours ÷ bare |\n|---|{'---|' * (len(names) + 1)}"
        for cell in dict.fromkeys(cell for _, cell in found):
            row = [cell_of(found[name, cell]) if (name, cell) in found else "–" for name in names]
            yield f"| {cell.name} | {' | '.join(row)} | {_ratio(title, found['ours', cell], found['bare', cell]):.2f} |"
    yield "\n| bytes logged | per call | per new token | per token of the history |\n|---|---|---|---|"
    for cell in dict.fromkeys(cell for _, cell in found):
        one = found["ours", cell]
        per_call = one.log_bytes / one.calls
        yield f"| {cell.name} | {per_call:.0f} | {one.log_bytes / one.new_tokens:.1f} | {per_call / SIZES[cell.size]:.3f} |"


def _ratio(title: str, ours: Measured, bare: Measured) -> float:
    values = [(one.cpu if "CPU" in title else one.ttft if "first" in title else one.p50) for one in (ours, bare)]
    return values[0] / values[1]


def inside_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown of the rows without Serve."""
    yield "\n| in one process, over ASGI | bare p50, ms | added | bare CPU, ms | added | | added to first byte |\n|---|---|---|---|---|---|---|"  # noqa: E501
    for row in rows:
        bare, recorded = inside_sides(row)
        name = f"{'streamed' if row['streamed'] else 'unary'}, {row['size']}"
        added = [recorded.p50 - bare.p50, recorded.cpu - bare.cpu, recorded.ttft - bare.ttft]
        yield (
            f"| {name} | {bare.p50:.2f} | {added[0]:+.2f} | {bare.cpu:.2f} | {added[1]:+.2f} | {added[1] / bare.cpu:+.1%} | {added[2]:+.2f} |"  # noqa: E501
        )


def inside_sides(row: dict[str, Any]) -> tuple[Measured, Measured]:
    """Bare and recorded of one of those rows."""
    sides = ((row[side]["calls"], row[side]["cpu_s"]) for side in ("bare", "recorded"))
    bare, recorded = (Measured([last for last, _ in calls], [first for _, first in calls], cpu) for calls, cpu in sides)
    return bare, recorded


def judge(found: dict[tuple[str, Cell], Measured], names: list[str]) -> list[Verdict]:
    """All targets."""
    cells = list(dict.fromkeys(cell for _, cell in found))
    told: list[Verdict] = []
    for cell in cells:
        bare, floor, ours = (found[name, cell] for name in ("bare", "floor", "ours"))
        told += verdicts(cell.name, bare, floor, ours, streamed=cell.streamed)
        if ("litellm", cell) in found:
            told.append(against_gateway(cell.name, bare, ours, found["litellm", cell]))
        shortest = Cell("1k", cell.streamed, 1)
        if cell.size != "1k" and cell.concurrency == 1 and ("ours", shortest) in found:
            told.append(growth(cell.name, found["ours", shortest], ours))
    return told


def figures(found: dict[tuple[str, Cell], Measured], rows: list[dict[str, Any]]) -> dict[str, float]:
    """By name, for `--json`."""
    named: dict[str, float] = {}
    for (server, cell), one in found.items():
        name = f"{server}.{'streamed' if cell.streamed else 'unary'}.{cell.size}.{cell.concurrency}"
        named |= {f"{name}.p50_ms": one.p50, f"{name}.p95_ms": one.p95, f"{name}.ttft_ms": one.ttft, f"{name}.cpu_ms": one.cpu}
        if one.log_bytes:
            named[f"{name}.log_bytes"] = one.log_bytes / one.calls
    for row in rows:
        for side, one in zip(("bare", "recorded"), inside_sides(row), strict=True):
            name = f"inside.{side}.{'streamed' if row['streamed'] else 'unary'}.{row['size']}"
            named |= {f"{name}.p50_ms": one.p50, f"{name}.ttft_ms": one.ttft, f"{name}.cpu_ms": one.cpu}
    return named


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description="Measure what recording costs.")
    parser.add_argument("--quick", action="store_true", help="short histories and few calls: a minute and a half")
    parser.add_argument("--inside", action="store_true", help="only the rows without Serve")
    parser.add_argument("--no-litellm", action="store_true", help="leave LiteLLM out")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures by name")
    given = parser.parse_args()
    began = time.monotonic()
    model = tiny_model()
    directory = Path(tempfile.mkdtemp(prefix="forge-ray-bench-"))
    try:
        if not given.no_litellm and not given.inside:
            LITELLM.install()
        words = directory / "words.json"
        words.write_text(json.dumps(vars(Words.of(model, SIZES))))
        rows = inside(words, model, given.quick)
        print("\n".join(inside_table(rows)), flush=True)
        found: dict[tuple[str, Cell], Measured] = {}
        told: list[Verdict] = []
        if not given.inside:
            cells = plan(given.quick)
            from tokenizers import Tokenizer

            tokens = REPLY_TOKENS + len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(NEXT).ids)
            with everything(directory, words, model, not given.no_litellm) as (servers, load):
                for size in dict.fromkeys(cell.size for cell in cells):
                    some = {cell: n for cell, n in cells.items() if cell.size == size}
                    begin(servers, load, size, max(cell.concurrency for cell in some))
                    found |= measure(servers, load, some, 2 if size == "1k" else 1, tokens)
                names = servers.names
            told = judge(found, names)
            print("\n".join(table(found, names)))
            print(f"\n{sum(one.met for one in told)} of {len(told)} targets met\n" + "\n".join(map(str, told)))
        print(f"\n{time.monotonic() - began:.0f} s in all")
        if given.json:
            given.json.write_text(json.dumps(figures(found, rows), indent=2) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if given.strict and not all(one.met for one in told) else 0


if __name__ == "__main__":
    raise SystemExit(main())
