"""`train`: the GRPO loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forge_ray.config.loss import Loss
from forge_ray.config.optimizer import Optimizer, Sft
from forge_ray.config.values import Count, NonNegative, Positive, Section, Share


class Train(Section):
    """The GRPO loop."""

    steps: Annotated[int, Field(ge=0)] = 100
    """Step batches, each followed by a weight update in the replicas."""
    groups_per_step: Count = 8
    """Groups in a step batch."""
    group_size: Count = 8
    """Rollouts per group."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Largest allowed (version − version of the oldest trained token) when a batch is consumed."""
    builder: Literal["chain", "per_call"] = "chain"
    """`chain` merges calls that extend one another into one sample; `per_call` makes a sample of each call."""
    gamma: Share = 1.0
    """Eq. 1: the reward of call t is gamma^(T-t) times the terminal reward."""
    kind_weights: dict[Literal["agent", "subagent", "compaction", "aux"], NonNegative] = {}
    """Weight of a kind of call (default 1 each, aux 0)."""
    scope: Literal["all", "outermost", "last"] = "all"
    """Which calls are trained: all, those of the outermost agent, or the last one."""
    normalize_std: bool = True
    """Divide the group-centred reward by the group's standard deviation (ddof 1)."""
    loss: Loss = Loss()
    """The policy loss."""
    optimizer: Optimizer = Optimizer()
    """AdamW and how a step batch is cut."""
    sft: Sft | None = None
    """Supervised start; null = none."""
    workers: Count = 1
    """Data-parallel train workers."""
    worker_cpus: Positive = 1
    """Logical CPUs of a worker."""
    worker_gpus: NonNegative = 0
    """GPUs of a worker."""
    threads: Count | None = None
    """torch threads of a worker; None = torch's default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: forward and backward under autocast; the weights stay float32. Raise `logprob_bound` with it."""
    checkpoint_every: Count = 10
    """Steps between checkpoints; the last step always gets one."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    logprob_bound: Positive = 1e-3
    """The run stops when mean |rollout − trainer logprob|, under the weights that sampled the token, is above this."""
