"""The conformance suite on our own proxy: every program on every case that it has, its recording compared with the script token by token.

One cluster and one deployment serve the module. The chosen tests' plans run two at a time from the first test on; each test waits for its
own result, so the table of pytest is the suite's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from forge_ray.conformance import launching, ours, suite
from forge_ray.conformance.cases import CASES
from forge_ray.conformance.plan import Plan
from forge_ray.conformance.programs import PROGRAMS
from forge_ray.harnesses.harness import get
from tests.harness.installed import require
from tests.integration.conftest import start_ray

pytestmark = pytest.mark.timeout(1800)

JOBS = 2
PLANS = [plan for program in PROGRAMS.values() for case in CASES.values() if (plan := case(program)) is not None]

Results = dict[str, "Future[suite.Result]"]


def chosen(request: pytest.FixtureRequest) -> list[Plan]:
    """The plans of this session's tests whose program is there."""
    items = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid + "::")]
    plans: list[Any] = [item.callspec.params["plan"] for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return [plan for plan in plans if not get(plan.program, dict(plan.options)).check()]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    """A result to come for each plan, by its name."""
    import ray

    plans = chosen(request)
    results: Results = {plan.name: Future() for plan in plans}

    def tell(result: suite.Result) -> None:
        results[f"{result.program}/{result.case}"].set_result(result)

    def broken(whole: Future[list[suite.Result]]) -> None:
        for result in results.values():
            if not result.done():
                result.set_exception(whole.exception() or AssertionError("the suite has left this out"))

    directory = launching.directory()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    try:
        config = ours.configure(plans, directory / "proxy", int(os.environ.get("FORGE_RAY_TEST_PORT", "18745")))
        start_ray(RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="120", RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S="120")
        with ours.serve(plans, config, directory / "proxy") as bench:
            thread.start()
            whole = asyncio.run_coroutine_threadsafe(suite.run_all(plans, bench, directory, JOBS, tell), loop)
            whole.add_done_callback(broken)
            yield results
            whole.cancel()
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_conforms(plan: Plan, request: pytest.FixtureRequest) -> None:
    require(plan.program)
    results: Results = request.getfixturevalue("results")
    result = results[plan.name].result(1500)
    asked = "\n".join(f"  {asked['path'].rpartition('/')[2]} -> {asked['status']} {asked['fault'] or ''}" for asked in result.requests)
    problems = "\n".join(f"  {problem}" for problem in result.problems)
    assert result.verdict == "ok", f"{plan.name}\n{problems}\nrequests:\n{asked}\nend of its output:\n{result.log[-3000:]}"
    assert "recording" in result.checked


def test_every_case_has_a_program() -> None:
    """What the suite promises: four turns of all, sub-agents and compactions of those that have them, five faults of all."""
    have = {case: {plan.program for plan in PLANS if plan.case == case} for case in CASES}
    everybody = set(PROGRAMS)
    assert all(have[case] == everybody for case in CASES if case not in ("subagent", "compaction"))
    assert everybody - have["subagent"] == {"openclaw", "mini_swe_agent"}
    assert everybody - have["compaction"] == {"zeroclaw", "openclaw", "gemini_cli", "mini_swe_agent"}
