"""The lines of metrics: of a step what the batch says, what the trainer measured, and what only the driver sees; of a held-out evaluation
what its rollouts say."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from forge_ray.outcome import RATED
from forge_ray.report import signal
from forge_ray.report.metrics import StepMetrics, read_evaluations, read_metrics
from forge_ray.report.statistics import mean_ci
from forge_ray.rollout import RolloutRecord, passes, reward_of
from forge_ray.run_dir import RunDir
from forge_ray.trajectories import continuity

if TYPE_CHECKING:
    from forge_ray.report.metrics import MetricsWriter
    from forge_ray.report.progress import Progress


def reward_figures(records: Iterable[RolloutRecord]) -> dict[str, float | None]:
    """`reward_ci` and `pass_rate` of a step's rollouts, for the stats of its batch; None where no reward may be counted."""
    rewards = [reward for record in records if (reward := reward_of(record)) is not None]
    return {"reward_ci": mean_ci(rewards)[1], "pass_rate": sum(map(passes, rewards)) / len(rewards) if rewards else None}


class Batches(Protocol):
    """What the report asks of a run's step batches."""

    def stats(self, step: int) -> dict[str, Any]:
        """What is known of the stored batch of `step`."""
        ...


class StepReport:
    """Writes and shows the steps of a run."""

    def __init__(self, run: RunDir, epochs: int, batches: Batches, metrics: MetricsWriter, progress: Progress) -> None:
        self._run, self._epochs, self._batches, self._metrics, self._progress = run, epochs, batches, metrics, progress

    def step(self, event: dict[str, Any], trained: dict[str, Any], driven: dict[str, Any]) -> None:
        """A trained step, of the trainer's `weights` event; `driven`: the driver's own fields of `StepMetrics`."""
        if warned := continuity.warning(event["stats"]):
            self._progress.warn(f"step {event['step']}: {warned}")
        self._write(self._row(event["step"], event["version"], event["stats"], trained).model_copy(update=driven))

    def restored(self, step: int, checkpoint: dict[str, Any]) -> None:
        """The step of the checkpoint that a stopped run goes on from, if its driver died before it had written it down."""
        if all(row.step != step for row in read_metrics(self._run.metrics)):
            stats = self._batches.stats(step - 1)
            self._write(self._row(step, f"{checkpoint['incarnation']}.{step}", stats, checkpoint["metrics"]))

    def evaluation(self, label: str, step: int, records: Iterable[RolloutRecord]) -> None:
        """An evaluation that has ended, of the weights after `step` steps."""
        from forge_ray.report.evaluation.summary import summarize

        records = list(records)
        rated = [record for record in records if record.outcome in RATED]
        found = summarize(rated)
        row = {"event": "eval", "label": label, "step": step, "ended": time.time(), "unrated": len(records) - len(rated)}
        self._metrics.append({**row, **(found.numbers() if found is not None else {})})

    def outdated(self, label: str, step: int) -> float:
        """Unix seconds at which the evaluation `label` had ended, if that was of other weights than those after `step` steps; else 0.
        Rollouts from before then say nothing about these: the run was resumed with more steps."""
        last = read_evaluations(self._run.metrics).get(label)
        return 0.0 if last is None or last["step"] == step else float(last.get("ended", 0.0))

    def _write(self, row: StepMetrics) -> None:
        self._metrics.append(row)
        self._progress.step(row)
        for warned in (signal.warning(row), signal.untrainable(row), signal.left_out(row)):
            if warned:
                self._progress.warn(f"step {row.step}: {warned}")

    def _row(self, step: int, version: str, stats: dict[str, Any], trained: dict[str, Any]) -> StepMetrics:
        tokens = int(stats["tokens_trained"])
        return StepMetrics(
            step=step,
            version=version,
            reward_mean=stats.get("reward_mean"),
            reward_ci=stats["reward_ci"],
            pass_rate=stats["pass_rate"],
            outcomes=stats["outcomes"],
            groups=int(stats["groups"]),
            degenerate_groups=int(stats["groups_degenerate"]),
            staleness_mean=stats["staleness_mean"],
            staleness_max=int(stats["staleness_max"]),
            tokens=tokens,
            train_tokens_per_s=tokens * self._epochs / max(trained["train_s"], 1e-6),
            samples_per_rollout=stats.get("samples_per_rollout"),
            **trained,
            **{
                name: stats.get(name)
                for name in ("calls_exact", "calls_spliced", "calls_forked", "fork_reason", "held_s", "staleness_tokens", "harnesses")
            },
            **{name: stats[name] for name in ("stale_groups", "empty_groups", "rollouts_untrained")},
            **{name: stats.get(name) for name in ("resampled_groups", "unused_rollouts")},
            treatments=stats.get("treatments", {}),
            **{name: value for name, value in stats.items() if name.startswith(("reward/", "call_reward"))},
        )
