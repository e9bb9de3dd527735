"""`train.lora`: train small matrices beside the weights, and send only them to the replicas."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forge_ray.config.values import Count, Section


class Lora(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685): the weight W of a target becomes W + alpha / rank · B A; only A and B are trained.

    B begins at 0, so that training begins at the policy as it was, and that policy is the reference of the KL term.
    """

    rank: Count = 16
    """Rows of A and columns of B."""
    alpha: Count = 32
    """Scale, in units of 1 / rank."""
    rank_stabilized: bool = False
    """Scale by alpha / √rank (Kalajdzievski 2023, arXiv 2312.03732)."""
    targets: Annotated[list[str], Field(min_length=1)] = ["all-linear"]
    """Ends of the names of the layers, `[q_proj, v_proj]`; `all-linear`: every linear layer but the output head."""
