"""`python -m benchmarks.failures`: what each failure policy costs in rollouts that no step trains, on the real scheduler.

Attempts fail at random, independently, with the seed's draws the same for every policy; groups of `--group` are admitted, retried, shrunk
or dropped by `forge_ray.job.flow` as in a run, and a step takes what is ready. Counted at the end, when everything that was started has
ended: untrained / started, where started is every attempt. By arithmetic, with p = 0.05 and n = 8: a retried or a shrunk failure costs
itself alone, p = 0.05; a dropped group costs its eight, 1 − (1 − p)^n = 0.34.

With `--truncated` a share of the attempts runs into a limit. They are kept and trained, but for `drop truncated` (OpenForgeRL's preset).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_ray.config import Config
from forge_ray.job.flow import Flow
from forge_ray.job.scheduler import TaskRef
from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRecord, RolloutRequest

INFRASTRUCTURE = ("harness", "sandbox", "proxy", "engine", "verifier")
POLICIES: dict[str, dict[str, str]] = {
    "retry": dict.fromkeys(INFRASTRUCTURE, "retry"),
    "shrink": dict.fromkeys(INFRASTRUCTURE, "drop"),
    "drop_group": dict.fromkeys(INFRASTRUCTURE, "drop_group"),
    "retry, drop truncated": {**dict.fromkeys(INFRASTRUCTURE, "retry"), "truncated": "drop"},
}
"""Name → `rollouts.on_outcome`."""


@dataclass(frozen=True)
class Spent:
    """One policy."""

    started: int
    """Attempts."""
    trained: int
    """Rollouts that a step has trained."""
    groups: int
    """Groups that a step has trained."""
    short: int
    """Of them, those with fewer rollouts than a group has."""
    lost_groups: int
    """Groups that no step trains."""

    @property
    def untrained(self) -> float:
        """Share of the started attempts."""
        return 1 - self.trained / self.started


def simulate(policy: str, *, attempts: int, failures: float, group: int, truncated: float = 0.0, seed: int = 0) -> Spent:
    """At least `attempts` attempts under `POLICIES[policy]`."""
    config = Config.model_validate(
        {
            "name": "failures", "seed": seed, "policy": {"model": "none"}, "harnesses": [{"name": "react"}], "tasks": {"train": "none"},
            "rollouts": {"max_in_flight": 64, "on_outcome": POLICIES[policy]},
            "train": {"steps": 10**9, "groups_per_step": 8, "group_size": group, "max_staleness": 1},
        }
    )  # fmt: skip
    flow, draw = Flow(config, [TaskRef(f"t{number}", f"/t{number}") for number in range(20)]), random.Random(seed)
    flying: list[RolloutRequest] = []
    started = trained = groups = short = version = 0
    while True:
        if started < attempts:
            flying += flow.launch(version)
        elif not flying:
            flying += flow.scheduler.launchable(10**9)  # what was admitted is brought to its end
            flow.in_flight += len(flying)
        if not flying:
            break
        request = flying.pop(draw.randrange(len(flying)))
        started += 1
        flow.finish(_ended(request, seed, failures, truncated))
        # A new version with each step: nothing here grows old.
        step = flow.scheduler.ready()
        if len(step) >= config.train.groups_per_step or (started >= attempts and not flying and not flow.scheduler.waiting):
            trained += sum(len(ready.records) for ready in step)
            groups += len(step)
            short += sum(len(ready.records) < group for ready in step)
            flow.used(step)
            version += 1
    return Spent(started, trained, groups, short, flow.scheduler.empty_groups)


def _ended(request: RolloutRequest, seed: int, failures: float, truncated: float) -> RolloutRecord:
    """How an attempt ends: a function of its name and the seed, so that every policy meets the same luck."""
    draw = random.Random(f"{seed}/{request.key}/{request.attempt}")
    outcome, reward = Outcome.OK, float(draw.random() < 0.5)
    if draw.random() < failures:
        outcome = Outcome(draw.choice(INFRASTRUCTURE))
    elif draw.random() < truncated:
        outcome = Outcome.TRUNCATED
    return RolloutRecord(
        id=f"{request.key}.{request.attempt}", key=request.key, purpose="train", task=request.task, task_name=request.task_name,
        harness=request.harness, group=request.group, attempt=request.attempt, outcome=outcome, detail="",
        reward=reward if outcome in (Outcome.OK, Outcome.TRUNCATED) else None,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description="What failure policies cost.")
    parser.add_argument("--attempts", type=int, default=40_000)
    parser.add_argument("--failures", type=float, default=0.05, help="share of the attempts that infrastructure ends")
    parser.add_argument("--truncated", type=float, default=0.0, help="share of the rest that runs into a limit")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="10,000 attempts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures by name")
    given = parser.parse_args(arguments)
    attempts = 10_000 if given.quick else given.attempts
    figures: dict[str, float] = {}
    arithmetic = {"retry": given.failures, "shrink": given.failures, "drop_group": 1 - (1 - given.failures) ** given.group}
    columns = f"{'untrained':>10} {'arithmetic':>11} {'of retry':>9} {'short groups':>13} {'lost groups':>12}"
    print(f"{'policy':<22} {'started':>8} {'trained':>8} {columns}")
    base = 0.0
    for policy in POLICIES:
        if "truncated" in policy and not given.truncated:
            continue
        spent = simulate(policy, attempts=attempts, failures=given.failures, group=given.group, truncated=given.truncated, seed=given.seed)
        base = base or spent.untrained
        expected = f"{arithmetic[policy]:.3f}" if policy in arithmetic else "-"
        ratio = f"{spent.untrained / base:.1f} x" if base else "-"
        short = f"{spent.short / max(spent.groups, 1):.0%}"
        numbers = f"{spent.untrained:>10.3f} {expected:>11} {ratio:>9} {short:>13} {spent.lost_groups:>12}"
        print(f"{policy:<22} {spent.started:>8} {spent.trained:>8} {numbers}")
        figures |= {f"untrained_{policy.replace(', ', '_').replace(' ', '_')}": spent.untrained}
    if given.json:
        figures |= {"attempts": attempts, "failures": given.failures, "group": given.group}
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
