"""`python -m forge_ray.conformance`: see docs/conformance.md."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge_ray.conformance import launching, suite
from forge_ray.conformance.bench import Foreign
from forge_ray.conformance.cases import CASES
from forge_ray.conformance.plan import Plan
from forge_ray.conformance.programs import PROGRAMS
from forge_ray.conformance.recording import Reader
from forge_ray.conformance.suite import Result
from forge_ray.errors import UserError

QUICK = ("words", "subagent", "cut")
"""Cases of a quick run."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forge_ray.conformance", description="Real agent programs through a model proxy.")
    parser.add_argument("--program", action="append", choices=list(PROGRAMS), help="only this one (may be repeated)")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help=f"only the cases {', '.join(QUICK)}")
    parser.add_argument("--jobs", type=int, default=2, help="programs that run at the same time (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result here")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep homes, workspaces, logs and requests here")
    parser.add_argument("--port", type=int, default=18790, help="port of our own proxy (default 18790)")
    parser.add_argument("--list", action="store_true", help="print the programs and cases, run nothing")
    other = parser.add_argument_group("another proxy than our own")
    other.add_argument(
        "--proxy", metavar="URL", help="its URL, with {session} where it takes one; `none`: programs talk to the upstream itself"
    )
    other.add_argument("--key", default="conformance-{session}", help="API key that it wants (default conformance-{session})")
    other.add_argument("--model", default="policy", help="model name that it routes to the upstream (default policy)")
    other.add_argument("--upstream-port", type=int, default=18780, help="port of 127.0.0.1 on which the scripted upstream is served")
    other.add_argument("--reader", metavar="MODULE:CLASS", help="adapter that reads its recording")
    other.add_argument("--settle", type=float, default=2.0, metavar="SECONDS", help="time that its recording takes to be complete")
    return parser


def reader_of(name: str) -> Reader:
    """The adapter `module:Class`, made without arguments."""
    module, separator, attribute = name.partition(":")
    try:
        if not separator:
            raise AttributeError("no class was named")
        return getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise UserError(f"{name} cannot be used ({error})", where="--reader", fix="give module:Class, importable from here") from None


async def foreign(options: argparse.Namespace, plans: list[Plan], directory: Path, tell: Any) -> list[Result]:
    """Run on another proxy, or on none."""
    bench = Foreign(
        plans,
        url=None if options.proxy == "none" else options.proxy,
        key=options.key,
        model=options.model,
        port=options.upstream_port,
        reader=reader_of(options.reader) if options.reader else None,
        settle_s=options.settle,
    )
    try:
        await bench.start()
    except OSError as error:
        fix = "choose another with --upstream-port"
        raise UserError(f"port {options.upstream_port} cannot be used ({error.strerror})", where="--upstream-port", fix=fix) from None
    try:
        return await suite.run_all(plans, bench, directory, options.jobs, tell)
    finally:
        await bench.stop()


def main(given: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(given)
    programs = options.program or list(PROGRAMS)
    cases = options.case or (list(QUICK) if options.quick else list(CASES))
    if options.list:
        print("programs:", *PROGRAMS, "\ncases:", *CASES)
        return 0
    try:
        plans, others = suite.plans_of(programs, cases)
        directory = _directory(options.keep)
        try:
            results = _run(options, plans, directory)
        finally:
            if options.keep is None:
                shutil.rmtree(directory, ignore_errors=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results += others
    order = {name: place for place, name in enumerate(programs)}
    results.sort(key=lambda result: order[result.program])
    print(suite.table(results))
    if text := suite.details(results):
        print("\n" + text)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], ensure_ascii=False, indent=1))
    return 1 if any(result.verdict in ("failed", "missing") for result in results) else 0


def _run(options: argparse.Namespace, plans: list[Plan], directory: Path) -> list[Result]:
    def tell(result: Result) -> None:
        print(f"{result.program}/{result.case}: {result.verdict} ({result.seconds:.0f} s)", file=sys.stderr, flush=True)

    if not plans:
        return []
    if options.proxy is not None:
        return asyncio.run(foreign(options, plans, directory, tell))
    from forge_ray.conformance import ours

    return ours.run(plans, directory, options.jobs, tell, options.port)


def _directory(keep: Path | None) -> Path:
    if keep is None:
        return launching.directory()
    keep.mkdir(parents=True, exist_ok=True)
    return keep.resolve()


if __name__ == "__main__":
    # So that the programs that run are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
