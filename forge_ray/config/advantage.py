"""`train.advantage`: how good a rollout was against others."""

from __future__ import annotations

from typing import Literal

from forge_ray.config.values import Section


class Advantage(Section):
    """How good a rollout was against others; formulas in [samples](samples.md#advantage)."""

    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "grpo"
    """`grpo`: centred on the group's mean, divided by its standard deviation (n − 1). `dr_grpo`: centred alone. `rloo`: against the mean of
    the others. `reinforce_pp`: against the whole step. `reinforce_pp_baseline`: centred on the group, scaled by the step."""
    group_by: Literal["task_harness", "task"] = "task_harness"
    """What a group has in common: task and harness, or the task alone (its rollouts go round over the harnesses)."""
