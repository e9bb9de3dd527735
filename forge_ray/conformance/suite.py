"""Runs plans on a bench and says what came out.

Every run has a door of its own in front of the proxy, whose journal says what the program asked for and got. Runs are independent of one
another and go in parallel up to a number of jobs; a program runs once at a time, because some have state beside their home.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge_ray.conformance import check, launching
from forge_ray.conformance.bench import Bench
from forge_ray.conformance.cases import CASES
from forge_ray.conformance.check import Problem
from forge_ray.conformance.door import Door, Exchange, Forward
from forge_ray.conformance.plan import Plan
from forge_ray.conformance.programs import PROGRAMS
from forge_ray.harnesses.harness import Launch, get


@dataclass
class Result:
    """One program on one case."""

    program: str
    case: str
    verdict: str
    """ok | failed | none (the program has no such thing) | missing (the program is not installed)."""
    problems: list[Problem] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    """Aspects that were looked at."""
    exit_code: int | None = None
    seconds: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Requests for a completion as the program made them: path, status, fault."""
    log: str = ""
    """The end of the program's output, when something failed."""


def plans_of(programs: Iterable[str], cases: Iterable[str]) -> tuple[list[Plan], list[Result]]:
    """The plans there are, and a result for each program and case that cannot run."""
    plans, others = [], []
    cases = list(cases)
    for name in programs:
        missing = get(name, dict(PROGRAMS[name].options)).check()
        for case in cases:
            plan = CASES[case](PROGRAMS[name])
            if plan is None:
                others.append(Result(name, case, "none"))
            elif missing:
                others.append(Result(name, case, "missing", log="; ".join(str(line) for line in missing)))
            else:
                plans.append(plan)
    return plans, others


async def run_all(plans: Sequence[Plan], bench: Bench, directory: Path, jobs: int, tell: Any = None) -> list[Result]:
    """Run every plan; `directory` gets a folder for each. `tell(result)` is called as they end."""
    places = asyncio.Semaphore(jobs)
    locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def one(plan: Plan) -> Result:
        async with locks[plan.program], places:
            result = await run_one(plan, bench, directory / plan.program / plan.case)
        if tell is not None:
            tell(result)
        return result

    return list(await asyncio.gather(*(one(plan) for plan in plans)))


async def run_one(plan: Plan, bench: Bench, directory: Path) -> Result:
    """Run one plan in `directory`, which must not exist or be an earlier one's."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    session = f"{plan.program}-{plan.case}-{uuid.uuid4().hex[:8]}"
    at = await bench.address(session)
    door = await Door(Forward(at.target), plan.faults if bench.faults_in_front else ()).start()
    home, workspace = directory / "home", directory / "workspace"
    try:
        launch = Launch(
            instruction=plan.prompt,
            workspace=str(workspace),
            home=str(home),
            base_url=door.url + at.prefix,
            key=at.key,
            model=at.model,
            context_window=plan.window,
        )
        command = get(plan.program, dict(plan.options)).configure(launch)
        ended = await launching.run(command, home, workspace, directory / "log", plan.deadline_s)
    finally:
        await door.stop()
    await bench.settle(session)
    problems = check.workspace(plan, workspace)
    if ended.exit_code is None:
        problems.append(Problem("program", f"did not end within {plan.deadline_s:.0f} s"))
    checked = ["workspace"]
    said = bench.said(plan)
    if said is not None:
        problems += check.asked(plan, said)
        checked.append("script")
    calls = []
    if bench.reader is not None:
        calls = await bench.reader.calls(session)
        problems += check.recording(plan, calls, bench.script, bench.reader)
        checked.append("recording")
    _keep(directory, door.journal, calls)
    return Result(
        plan.program,
        plan.case,
        "failed" if problems else "ok",
        problems,
        checked,
        ended.exit_code,
        round(ended.seconds, 1),
        [{"path": e.path.partition("?")[0], "status": e.status, "fault": e.fault, "whole": e.whole} for e in door.completions()],
        ended.log if problems else "",
    )


def _keep(directory: Path, journal: Sequence[Exchange], calls: Sequence[Any]) -> None:
    """What a person needs to see why: the requests with their bodies, and the recording."""
    with (directory / "requests.jsonl").open("w") as file:
        for exchange in journal:
            text = exchange.body.decode(errors="replace")
            try:
                body = json.loads(text)
            except ValueError:
                body = text
            file.write(json.dumps({**asdict(exchange), "body": body}, ensure_ascii=False) + "\n")
    with (directory / "recording.jsonl").open("w") as file:
        for call in calls:
            file.write(json.dumps(asdict(call), ensure_ascii=False) + "\n")


def table(results: Sequence[Result]) -> str:
    """Programs down, cases across."""
    cases = [case for case in CASES if any(result.case == case for result in results)]
    programs = list(dict.fromkeys(result.program for result in results))
    cells = {(result.program, result.case): _cell(result) for result in results}
    rows = [["", *cases]] + [[name, *(cells.get((name, case), "") for case in cases)] for name in programs]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cell(result: Result) -> str:
    if result.verdict != "failed":
        return {"ok": "ok", "none": "-", "missing": "missing"}[result.verdict]
    return "FAILED " + ",".join(dict.fromkeys(problem.aspect for problem in result.problems))


def details(results: Sequence[Result]) -> str:
    """One line per problem."""
    lines = []
    for result in results:
        if result.verdict == "missing":
            lines.append(f"{result.program}/{result.case}: {result.log}")
        lines += [f"{result.program}/{result.case}: {problem}" for problem in result.problems]
    return "\n".join(dict.fromkeys(lines))
