"""`train`: the GRPO loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forge_ray.config.advantage import Advantage
from forge_ray.config.credit import Credit
from forge_ray.config.lora import Lora
from forge_ray.config.loss import Loss
from forge_ray.config.offline import Offline
from forge_ray.config.optimizer import Optimizer, Sft
from forge_ray.config.strategy import DeepSpeed
from forge_ray.config.sync import Sync
from forge_ray.config.tree import Tree
from forge_ray.config.values import Count, NonNegative, Positive, Section


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
    on_stale: Literal["wait", "drop"] = "wait"
    """`wait`: a step waits for a slow group that would be too old for the next; `drop`: it does not, and what is too old is dropped."""
    sync: Sync = Sync()
    """How new weights come into the replicas."""
    builder: Literal["chain", "per_call", "tree"] = "chain"
    """`chain` merges calls that extend one another into one sample; `per_call` makes a sample of each call; `tree` makes a trie, in which
    every token that calls share is computed once. See [samples](samples.md)."""
    tree: Tree = Tree()
    """Of `builder: tree`."""
    dynamic_sampling: bool = False
    """DAPO: a group that says nothing (all its rewards are equal) is replaced by a further one, so that each group of a step teaches."""
    max_resampled_groups: Annotated[int, Field(ge=0)] = 24
    """Most groups that are replaced so for one step; after that the step takes what it gets."""
    offline: Offline | None = None
    """Train on stored rollouts; null = on those that harnesses make."""
    credit: Credit = Credit()
    """What a rollout's reward is worth at each of its calls."""
    advantage: Advantage = Advantage()
    """How good a rollout was against others."""
    loss: Loss = Loss()
    """The policy loss."""
    optimizer: Optimizer = Optimizer()
    """AdamW and how a step batch is cut."""
    sft: Sft | None = None
    """Supervised start; null = none."""
    lora: Lora | None = None
    """Train adapters; null = all weights. The supervised start trains all weights, and is what the adapters stand beside."""
    strategy: Literal["ddp", "deepspeed"] = "ddp"
    """`ddp`: every worker holds everything, gradients are summed once per update; `deepspeed`: see `train.deepspeed`."""
    deepspeed: DeepSpeed = DeepSpeed()
    """DeepSpeed's part."""
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
    packing: bool = True
    """Put sequences end to end, none of which sees another, rather than beside each other with padding. A model whose attention cannot be
    cut so (windows, capped logits) is padded all the same."""
    gradient_checkpointing: bool = False
    """Forget the activations of each layer and compute them again in the backward pass: less memory, a third more time."""
    checkpoint_every: Count = 10
    """Steps between checkpoints; the last step always gets one."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    keep_best: Literal["heldout", "reward"] | None = None
    """Keep the best one too: of the highest held-out pass@1 (see `eval.every`), or of the highest mean reward in training."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Times that the workers may be started again after one of them was lost; each goes on from the newest checkpoint."""
    logprob_bound: Positive = 1e-3
    """The run stops when mean |rollout − trainer logprob|, under the weights that sampled the token, is above this."""
