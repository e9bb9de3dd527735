"""`train.tree`: what `builder: tree` makes, and how it is run."""

from __future__ import annotations

from typing import Literal

from forge_ray.config.values import Count, Section


class Tree(Section):
    """What `builder: tree` makes, and how it is run."""

    span: Literal["rollout", "step"] = "step"
    """One trie for each rollout, or one for the whole step: what rollouts have in common is then computed once."""
    piece_tokens: Count | None = None
    """Tokens whose activations are alive at once: a larger trie is computed in pieces, with the same gradients. None:
    `train.optimizer.microbatch_tokens`."""
