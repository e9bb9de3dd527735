"""The report's section on asynchrony: how old the trained tokens were, step by step, and who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence

from forge_ray.report.metrics import StepMetrics
from forge_ray.report.svg import Line, chart

NOTE = (
    "Above: share of each batch's trained tokens by staleness (versions between the weights that sampled a token and those that it "
    "trained). Below: share of the step in which the trainer waited for rollouts, and of the places for rollouts that stood empty."
)


def section(steps: Sequence[StepMetrics]) -> str:
    """Two charts."""
    x = [step.step for step in steps]
    idle = [
        Line("trainer idle", x, [step.trainer_idle_share for step in steps]),
        Line("places idle", x, [step.slot_idle_share for step in steps], colour="var(--two)"),
    ]
    return chart(_ages(steps), y_label="share of tokens", y_range=(0.0, 1.0)) + chart(idle, y_label="share", y_range=(0.0, 1.0))


def _ages(steps: Sequence[StepMetrics]) -> list[Line]:
    """A curve of each staleness that occurs."""
    ages = sorted({int(age) for step in steps for age in step.staleness_tokens or ()})
    return [
        Line(
            f"staleness {age}",
            [step.step for step in steps],
            [None if not (found := step.staleness_tokens) else found.get(str(age), 0) / sum(found.values()) for step in steps],
            colour=f"hsl({(210 + 137 * place) % 360} 55% 50%)",
        )
        for place, age in enumerate(ages)
    ]
