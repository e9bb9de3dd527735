"""The rollouts of a run directory as the report sees them."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from forge_ray.outcome import RATED
from forge_ray.report.metrics import read_evaluations
from forge_ray.report.statistics import PassRate, pass_rate
from forge_ray.rollout import RolloutRecord, passes
from forge_ray.run_dir import RunDir

_EVALUATION = re.compile(r"eval-(step-\d+|[A-Za-z0-9_]+)-.+")


def read_records(run: RunDir, ids: str = "*") -> list[RolloutRecord]:
    """Every `rollouts/<id>/result.json`, by the time the rollout started; files that are not readable as one are left out. `ids`: a pattern
    of names."""
    records = []
    for file in run.rollouts.glob(f"{ids}/result.json"):
        try:
            records.append(RolloutRecord.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError):
            continue
    return sorted(records, key=lambda record: (record.started, record.id))


def evaluation(record: RolloutRecord) -> str | None:
    """The label of the evaluation that the rollout belongs to (`before`, `after`, `step-12`, …): key `eval-<label>-<task>-<sample>`."""
    match = _EVALUATION.fullmatch(record.key) if record.purpose == "eval" else None
    return match[1] if match else None


def harness_title(name: str) -> str:
    """What a harness is called where people read: one from a file (`/a/b.py:Class`) goes by its class."""
    return name.rpartition(".py:")[2]


def passed(record: RolloutRecord) -> bool:
    return passes(record.reward)


def evaluations(records: Iterable[RolloutRecord]) -> dict[str, list[RolloutRecord]]:
    """Rated evaluation rollouts by label, in the order of the labels' first rollout; of each key the last rated attempt."""
    found: dict[str, dict[str, RolloutRecord]] = {}
    for record in records:
        label = evaluation(record)
        if label is None or record.outcome not in RATED or record.reward is None:
            continue
        best = found.setdefault(label, {}).get(record.key)
        if best is None or record.attempt >= best.attempt:
            found[label][record.key] = record
    return {label: list(by_key.values()) for label, by_key in found.items()}


def pass_at_1(records: Iterable[RolloutRecord]) -> PassRate | None:
    """pass@1 with its interval over the tasks of rated `records`."""
    return pass_rate(samples_by_task(records))


def samples_by_task(records: Iterable[RolloutRecord]) -> dict[str, list[bool]]:
    """`{task: [passed, …]}` of rated `records`, whatever their harness."""
    found: dict[str, list[bool]] = {}
    for record in records:
        found.setdefault(record.task_name, []).append(passed(record))
    return found


def evaluation_points(run: RunDir, by_label: Mapping[str, Iterable[RolloutRecord]]) -> list[tuple[int, PassRate]]:
    """`(step, pass@1)` of every evaluation that has ended, by step."""
    rates = [(made["step"], pass_at_1(by_label.get(label, ()))) for label, made in read_evaluations(run.metrics).items()]
    return sorted(((step, rate) for step, rate in rates if rate is not None), key=lambda point: point[0])


def outcomes(records: Iterable[RolloutRecord]) -> dict[str, int]:
    """Rollouts (every attempt counts) by outcome class, the most frequent first."""
    return dict(Counter(record.outcome.value for record in records).most_common())


@lru_cache(maxsize=4096)
def family(task: str) -> str | None:
    """`[metadata] family` (else `category`) of the task directory `task`; None where it says none or cannot be read."""
    try:
        metadata = tomllib.loads((Path(task) / "task.toml").read_text()).get("metadata", {})
    except (OSError, ValueError):
        return None
    name = metadata.get("family", metadata.get("category")) if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else None
