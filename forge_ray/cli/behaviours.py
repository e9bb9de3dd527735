"""`forge-ray rollouts behaviour RUN`: how the policy worked, before and after, in each harness."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_ray.report.behaviour import Trajectory
    from forge_ray.report.stored.select import Filter


def behaviour(arguments: argparse.Namespace, wanted: Filter) -> int:
    """Print the table: a row for each evaluation, and for the training rollouts, of each harness."""
    from forge_ray.cli.exports import text_of
    from forge_ray.cli.stored_run import stored_run
    from forge_ray.outcome import RATED
    from forge_ray.report.behaviour import Trajectory, actions, measure, table, tools
    from forge_ray.report.records import evaluation, passed
    from forge_ray.report.stored import select
    from forge_ray.trajectories.export.text import leaves

    stored = stored_run(arguments.run)
    text, names = text_of(stored), {row["rollout"] for row in select.rows(stored.reader, wanted)}
    parts: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for record, calls in stored.reader.with_calls():
        if record.id not in names or record.outcome not in RATED:
            continue
        made = [
            action
            for call in leaves(calls)
            for action in actions([(message["role"], message["content"]) for message in text.conversation(call)[0]])
        ]
        part = evaluation(record) or ("training" if record.purpose == "train" else "single")
        parts[part, record.harness].append(Trajectory(record.harness, passed(record), tuple(made)))
    known = tools(one for part in parts.values() for one in part)
    several = len({harness for _, harness in parts}) > 1
    rows = {f"{part}, {harness}" if several else part: measure(found, known) for (part, harness), found in parts.items()}
    print("\n".join(table(rows)) if rows else "no rollout with a reward")
    return 0
