"""`train.offline`: training on stored rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forge_ray.config.values import Count, Section


class Offline(Section):
    """Training on rollouts that are stored already: no harness runs, nothing is served. See [rewards.md](rewards.md#offline-training)."""

    runs: Annotated[list[str], Field(min_length=1)]
    """Run directories or stores (`s3://…`); `forge-ray train --from-rollouts A,B` sets them."""
    rewards: str = "recorded"
    """`recorded`; `latest`: the newest verdict of `forge-ray rollouts rescore` where there is one; or the name of one rescore."""
    groups: Literal["recorded", "task_harness"] = "recorded"
    """`recorded`: the groups as they were; `task_harness`: new ones of `train.group_size`, each of one task and harness, over all runs."""
    epochs: Count | None = None
    """Passes over the groups; nothing: as many as `train.steps` needs. The fewer steps of the two count."""
