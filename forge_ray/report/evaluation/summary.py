"""One evaluation put together: all estimates, over everything and by harness and kind of task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from forge_ray.report.evaluation.passes import Estimate, all_of, at_least_one, by_task, flips, powers
from forge_ray.report.evaluation.resampling import bootstrap
from forge_ray.report.records import family, pass_at_1, passed, samples_by_task
from forge_ray.report.statistics import Interval, PassRate, share
from forge_ray.rollout import RolloutRecord


@dataclass(frozen=True)
class Estimates:
    """What a set of rated rollouts says."""

    rate: PassRate
    """pass@1."""
    at_least_one: dict[int, Interval] = field(default_factory=dict)
    """pass@k by k."""
    all_of: dict[int, Interval] = field(default_factory=dict)
    """pass^k by k."""
    flips: Interval | None = None
    """Share of pairs of rollouts of one task that end differently; None without a task that has two."""

    def tree(self) -> dict[str, Any]:
        """For JSON."""

        def values(found: dict[int, Interval]) -> dict[str, Any]:
            return {str(k): interval._asdict() for k, interval in found.items()}

        return {
            **self.rate.model_dump(by_alias=True),
            "pass@k": values(self.at_least_one),
            "pass^k": values(self.all_of),
            "flip_rate": self.flips._asdict() if self.flips else None,
        }

    def numbers(self) -> dict[str, Any]:
        """For a line of metrics: names that every sink takes, estimates of k for the largest one."""
        rate = self.rate
        found = {"pass_at_1": rate.pass_at_1, "low": rate.low, "high": rate.high, "rollouts": rate.n, "tasks": rate.tasks}
        if self.flips is not None:
            most = max(self.at_least_one)
            found |= {
                "k": most,
                "pass_at_k": self.at_least_one[most].mean,
                "pass_all_k": self.all_of[most].mean,
                "flip_rate": self.flips.mean,
            }
        return found


@dataclass(frozen=True)
class EvaluationSummary:
    """Estimates of one evaluation; of the parts only where there is more than one."""

    whole: Estimates
    by_harness: dict[str, Estimates] = field(default_factory=dict)
    by_kind: dict[str, Estimates] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        parts = {"by_harness": self.by_harness, "by_kind": self.by_kind}
        return {**self.whole.tree(), **{name: {key: one.tree() for key, one in part.items()} for name, part in parts.items()}}

    def numbers(self) -> dict[str, Any]:
        """For a line of metrics."""
        parts = {"harnesses": self.by_harness, "kinds": self.by_kind}
        return {**self.whole.numbers(), **{name: {key: one.numbers() for key, one in part.items()} for name, part in parts.items() if part}}


def outcomes_by_task(records: Iterable[RolloutRecord]) -> dict[str, dict[str, list[bool]]]:
    """`{harness: {task: [passed, …]}}` of rated rollouts."""
    found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        found[record.harness][record.task_name].append(passed(record))
    return {harness: dict(tasks) for harness, tasks in found.items()}


def summarize(records: Iterable[RolloutRecord], *, resampled: bool = False) -> EvaluationSummary | None:
    """All estimates of rated rollouts, with bootstrap intervals if they are to be `resampled`; None without one."""
    records = list(records)
    whole = estimate(records, resampled)
    if whole is None:
        return None
    return EvaluationSummary(
        whole, _parts(records, resampled, lambda record: record.harness), _parts(records, resampled, lambda record: family(record.task))
    )


def estimate(records: list[RolloutRecord], resampled: bool = False) -> Estimates | None:
    """The estimates of these rollouts; None without one."""
    rate = pass_at_1(records)
    if rate is None:
        return None
    harnesses = outcomes_by_task(records)
    if resampled:
        drawn = bootstrap([sum(samples) / len(samples) for samples in samples_by_task(records).values()])
        assert drawn is not None
        rate = rate.model_copy(update={"low": drawn.low, "high": drawn.high})

    def of(function: Estimate, k: int) -> Interval | None:
        # Tasks are what is drawn: what several harnesses make of one task is no further task.
        values: dict[str, list[float]] = defaultdict(list)
        rollouts = 0
        for tasks in harnesses.values():
            for task, value in by_task(tasks, function, k).items():
                values[task].append(value)
                rollouts += len(tasks[task])
        means = [sum(several) / len(several) for several in values.values()]
        return bootstrap(means) if resampled else share(means, rollouts)

    def by_k(function: Estimate) -> dict[int, Interval]:
        found = {k: of(function, k) for k in powers(harnesses.values())}
        return {k: interval for k, interval in found.items() if interval is not None}

    return Estimates(rate, by_k(at_least_one), by_k(all_of), of(flips, 2))


def _parts(records: list[RolloutRecord], resampled: bool, name: Callable[[RolloutRecord], str | None]) -> dict[str, Estimates]:
    parts: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        parts[name(record) or "other"].append(record)
    if len(parts) < 2:
        return {}
    found = {key: estimate(part, resampled) for key, part in sorted(parts.items())}
    return {key: one for key, one in found.items() if one is not None}
