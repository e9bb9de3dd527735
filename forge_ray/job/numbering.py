"""What a run's groups and evaluations are numbered by, kept with the run: a run that goes on under another schedule would train other
tasks under the numbers of stored rollouts, or wait for rollouts that nobody asks for.

Kept in `state.json` from the first start on; a run from before there was such a thing is taken as it is.
"""

from __future__ import annotations

import json
from typing import Any

from forge_ray.config import Config, Source
from forge_ray.errors import UserError
from forge_ray.job.scheduler import TaskRef
from forge_ray.run_dir import RunDir, read_state, write_json

KEY = "schedule"
"""Of `state.json`."""

Numbering = dict[str, Any]
"""Config key -> its value, JSON; `tasks.*` -> names of the tasks, in order."""


def of_config(config: Config) -> Numbering:
    """What the config alone says."""
    return {
        "seed": config.seed,
        "harnesses": [harness.name for harness in config.harnesses],
        "train.group_size": config.train.group_size,
        "train.groups_per_step": config.train.groups_per_step,
        "tasks.train.options": _options(config.tasks.train),
        "tasks.heldout.options": _options(config.tasks.heldout),
    }


def of_tasks(train: list[TaskRef], heldout: list[TaskRef]) -> Numbering:
    """What was found where the config points."""
    return {"tasks.train": [task.name for task in train], "tasks.heldout": [task.name for task in heldout]}


def _options(source: Source | None) -> Any:
    if source is None or source.function is None:
        return None
    return json.loads(json.dumps(source.options, default=str))


def keep(run: RunDir, found: Numbering) -> None:
    """Note `found` in the run's state where nothing is noted yet, or nothing has been made of it; else compare. Raises `UserError`."""
    state = read_state(run)
    noted: Numbering = state.get(KEY, {})
    if _begun(run):
        compare(run, noted, found)
    if noted != (wanted := {**noted, **found}):
        write_json(run.state, {**state, KEY: wanted}, mode=0o600)


def check(run: RunDir, found: Numbering) -> None:
    """Compare `found` with what is noted, as far as it goes. Raises `UserError`."""
    if _begun(run):
        compare(run, read_state(run).get(KEY, {}), found)


def compare(run: RunDir, noted: Numbering, found: Numbering) -> None:
    """Raise `UserError` with the first key of both whose values differ, and how."""
    for key, now in found.items():
        if key in noted and noted[key] != now:
            raise UserError(
                f"{key} {_difference(noted[key], now)} since the run began, and its stored rollouts are numbered by it",
                where=str(run.root),
                fix="set it back, or start a new run under another name",
            )


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, list) and isinstance(now, list):
        gone, new = [x for x in before if x not in now], [x for x in now if x not in before]
        parts = [f"{verb} {_some(names)}" for verb, names in (("lost", gone), ("got", new)) if names]
        return f"has {' and '.join(parts)}" if parts else "has another order"
    return f"was {before!r} and is {now!r}: it has changed"


def _some(names: list[Any]) -> str:
    return f"{names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _begun(run: RunDir) -> bool:
    return any(run.rollouts.glob("*/result.json")) or any(run.data.glob("samples/step=*/*.parquet"))
