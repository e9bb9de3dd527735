"""`forge-ray rollouts behaviour RUN`: how the policy worked, before and after, in each harness."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forge_ray.report.behaviour import Trajectory
    from forge_ray.report.stored.select import Filter
    from forge_ray.trajectories.call import Call
    from forge_ray.trajectories.export.text import Text


def behaviour(arguments: argparse.Namespace, wanted: Filter) -> int:
    """Print the table: a row for each evaluation, and for the training rollouts, of each harness."""
    from forge_ray.cli.exports import text_of
    from forge_ray.cli.stored_run import stored_run
    from forge_ray.outcome import RATED
    from forge_ray.report.behaviour import Trajectory, actions, measure, table, tools
    from forge_ray.report.records import evaluation, harness_title, passed
    from forge_ray.report.stored import select

    stored = stored_run(arguments.run)
    text, names = text_of(stored), {row["rollout"] for row in select.rows(stored.reader, wanted)}
    parts: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for record, calls in stored.reader.with_calls():
        if record.id not in names or record.outcome not in RATED:
            continue
        made = [action for talk in _talks(calls, text) for action in actions(talk)]
        part = evaluation(record) or ("training" if record.purpose == "train" else "single")
        parts[part, record.harness].append(Trajectory(record.harness, record.task_name, passed(record), tuple(made)))
    known = tools(one for part in parts.values() for one in part)
    several = len({harness for _, harness in parts}) > 1
    rows = {f"{part}, {harness_title(harness)}" if several else part: measure(found, known) for (part, harness), found in parts.items()}
    print("\n".join(table(rows)) if rows else "no rollout with a reward")
    return 0


def _talks(calls: Sequence[Call], text: Text) -> Iterator[list[tuple[str, str]]]:
    """Each conversation as `(role, text)`: every reply once, as it was sampled, and what the harness put behind it."""
    from forge_ray.trajectories.export.text import usable

    conversations: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if usable(call):
            conversations[call.conversation].append(call)
    for members in conversations.values():
        talk: list[tuple[str, str]] = []
        for call, following in zip(members, [*members[1:], None], strict=True):
            talk.append(("assistant", text.reply(call)))
            parts = text.prompt(following, call) if following is not None else []
            last = max((place for place, part in enumerate(parts) if part.role == "assistant"), default=-1)
            talk += [(part.role, part.content) for part in parts[last + 1 :]]
        yield talk
