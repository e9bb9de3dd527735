"""Did a step teach anything? A group whose rollouts all got the same reward has no advantage and is masked: a step of such groups leaves
the weights as they are, whatever its reward is."""

from __future__ import annotations

from forge_ray.report.metrics import StepMetrics

SAME = "all rollouts of each group got the same reward"


def warning(step: StepMetrics) -> str | None:
    """One line for the user if the step trained nothing; None otherwise."""
    if step.signal != 0 or not step.groups:
        return None
    which = "0" if step.reward_mean == 0 else "1" if step.reward_mean == 1 else None
    advice = {
        "0": "easier tasks, a supervised start or a larger train.group_size would show the policy a success",
        "1": "harder tasks would leave something to learn",
    }.get(which or "", "a larger train.group_size would tell rollouts apart")
    return f"{SAME}{f' ({which})' if which else ''}; nothing was trained: {advice}"


def untrainable(step: StepMetrics) -> str | None:
    """One line for the user if the step trained nothing because no rollout had a token to train."""
    if not step.rollouts_untrained or step.tokens:
        return None
    why = "forge-ray replay says of each call why (images in its prompt, a grammar, its kind, train.credit.scope)"
    return f"nothing was trained: {step.rollouts_untrained} rollouts have no token that may be trained; {why}"


def untaught(steps: list[StepMetrics]) -> int:
    """Number of steps that trained nothing."""
    return sum(warning(step) is not None for step in steps)


def left_out(step: StepMetrics) -> str | None:
    """One line for the user if updates of the step were left out."""
    if not step.updates_skipped:
        return None
    made = step.updates or 0
    return (
        f"{step.updates_skipped} of {step.updates_skipped + made} updates were left out: the gradient was not finite, or above "
        "train.optimizer.skip_grad_norm; the weights are as they were before them"
    )
