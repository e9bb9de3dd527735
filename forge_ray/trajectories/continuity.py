"""How the calls of rollouts continue one another: the numbers that tell a user why a rollout became many samples.

A call that forks begins a new sample with its whole prompt as context, so a harness that rewrites its history each turn multiplies what
is trained. Counted are the calls that were sampled, delivered and not replaced, of agents and sub-agents: a summary or a title forks by its
nature. Reasons are grouped by what they say, without the places and texts that they show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from forge_ray.trajectories.call import Call, lived_through

MANY = 0.1
"""Share of forks, among the calls that could have continued one, from which on a user is told."""
Counts = Counter[tuple[str, str]]
"""Calls of a rollout by how they continue and, of forks, by the reason."""
_PLACE = re.compile(r"\s*(\(token \d|at character \d).*$")


def counts(calls: Iterable[Call]) -> Counts:
    """Of one rollout."""
    found: Counts = Counter()
    for call in calls:
        if lived_through(call) and call.kind in ("agent", "subagent"):
            found[call.splice, general(call.reason) if call.splice == "fork" else ""] += 1
    return found


def told(rollouts: Iterable[Counts]) -> dict[str, Any]:
    """Of all: `calls_exact`, `calls_spliced`, `calls_forked` (numbers of calls), and `fork_reason`, the commonest one with the number of
    its calls (`12 x thinking of the reply dropped by the harness`), where there is one."""
    splices: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for counted in rollouts:
        for (splice, reason), number in counted.items():
            splices[splice] += number
            if splice == "fork":
                reasons[reason] += number
    found: dict[str, Any] = {f"calls_{name}": splices[splice] for splice, name in _NAMES.items()}
    if reasons:
        reason, number = reasons.most_common(1)[0]
        found["fork_reason"] = f"{number} x {reason}"
    return found


_NAMES = {"exact": "exact", "spliced": "spliced", "fork": "forked"}


def general(reason: str | None) -> str:
    """A reason without the place and the texts that it shows."""
    return re.sub(r"\d+", "N", _PLACE.sub("", reason or "no reason was recorded"))


def warning(stats: Mapping[str, Any]) -> str | None:
    """One line for the user if many calls of a step forked; None otherwise. `stats`: the step batch's."""
    forked = stats.get("calls_forked", 0)
    total = forked + stats.get("calls_exact", 0) + stats.get("calls_spliced", 0)
    if not forked or forked < MANY * total:
        return None
    per_rollout = stats.get("samples_per_rollout")
    many = f", {per_rollout:.1f} samples per rollout" if per_rollout is not None else ""
    return (
        f"{forked} of {total} calls did not continue the call before them ({forked / total:.0%}{many}); "
        f"the commonest reason: {stats.get('fork_reason')}. See docs/recording.md#splice"
    )
