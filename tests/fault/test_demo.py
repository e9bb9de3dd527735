"""The demo from the command line, cut to two steps: everything that `make demo` does, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from forge_ray.report.metrics import read_evaluations, read_metrics
from forge_ray.trajectories.call_log import CallLogReader

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
MARK = "FORGE_RAY_TEST_RUN"
TASKS, SAMPLES, STEPS = 6, 2, 2


def marked(value: str) -> list[psutil.Process]:
    """Processes that have `MARK=value` in their environment: all that the run started and that kept its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_two_steps_of_the_demo(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [
        *(sys.executable, "-m", "forge_ray.cli.main", "train", str(ROOT / "examples" / "quickstart" / "run.yaml")),
        *("name=two-steps", f"runs={tmp_path}", "ray.address=local", "proxy.port=18790", f"train.steps={STEPS}", f"eval.samples={SAMPLES}"),
        *("train.sft.steps=300", "train.sft.demonstrations.options.count=2000", f"tasks.heldout.options.count={TASKS}"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {MARK: mark}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    run = tmp_path / "two-steps"
    log = (run / "run.log").read_text(errors="replace")[-4000:] if (run / "run.log").is_file() else ""
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{log}"

    lines = done.stdout.splitlines()
    assert lines[0] == f"run directory: {run}"
    assert sum(bool(re.match(rf"step [12]/{STEPS} · reward ", line)) for line in lines) == STEPS, "a line per step"
    assert re.match(r"held-out pass@1: .+ before, .+ after 2 steps$", lines[-2]), "what was learned"
    assert lines[-1] == f"report: {run / 'report.html'}"

    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["tokens"] > 0 and summary["seconds"]["total"] > 0
    for label in ("before", "after"):
        rate = summary["heldout"][label]
        assert rate["n"] == TASKS * SAMPLES and 0 <= rate["low"] <= rate["pass@1"] <= rate["high"] <= 1
    assert summary["outcomes"].get("ok", 0) + summary["outcomes"].get("truncated", 0) > 0.9 * sum(summary["outcomes"].values())

    steps = read_metrics(run / "metrics.jsonl")
    assert [step.step for step in steps] == [1, 2]
    told = {label: (row["step"], row["pass_at_1"]) for label, row in read_evaluations(run / "metrics.jsonl").items()}
    rates = {label: rate["pass@1"] for label, rate in summary["heldout"].items()}
    assert told == {"before": (0, rates["before"]), "after": (STEPS, rates["after"])}
    assert steps[0].tokens, "some group has rewards that differ, so something is learned"
    assert steps[0].logprob_diff is not None and all((step.logprob_diff or 0) < 1e-3 for step in steps)
    assert all(step.staleness_max is not None and step.staleness_max <= 1 for step in steps)

    # One incarnation for the proxy, one for the train worker: neither was started twice.
    assert json.loads((run / "state.json").read_text())["incarnation"] == 2
    assert "restarted" not in (run / "run.log").read_text()

    report = (run / "report.html").read_text()
    assert report.count("<article>") == 3 and report.count("<svg") == 4 and "tool_call" in report

    calls = CallLogReader(run / "calls")
    calls.refresh()
    sampled = sum(len(call.ids) for session in calls.sessions() for call in calls.session(session))
    assert sampled >= summary["tokens"] > 0
    for name in ("config.yaml", "inputs/model/config.json", "data/samples/step=0", "checkpoints", "rollouts/archive"):
        assert (run / name).exists(), name

    _, alive = psutil.wait_procs(marked(mark), timeout=60)
    assert [" ".join(process.cmdline())[:200] for process in alive] == []
