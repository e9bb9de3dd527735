"""Attention of a piece on GPUs: torch's FlexAttention, with a piece's mask as two integers per key.

Key k is seen by the queries `first[k] <= q < until[k]`: keys from before the piece from its beginning on, a piece's own from themselves on,
each up to the end of its subtree. On CPUs FlexAttention has no backward; there `cpu` is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from forge_ray.train_loop.tree.pieces import Own, Past


def spans(past: Sequence[Past], own: Sequence[Own], device: torch.device) -> tuple[Tensor, Tensor]:
    """`first` and `until` of all keys, those from before the piece first; int64, (keys,)."""
    before = [one.until for one in past for _ in range(one.end - one.first)]
    within = [one.until for one in own for _ in range(one.end - one.start)]
    first = [0] * len(before) + list(range(len(within)))
    return torch.tensor(first, device=device), torch.tensor([*before, *within], device=device)


def block_mask(past: Sequence[Past], own: Sequence[Own], device: torch.device) -> BlockMask:
    """The mask of a piece, the same for all layers and heads."""
    first, until = spans(past, own, device)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[key] <= query) & (query < until[key])

    return create_block_mask(visible, None, None, own[-1].end, len(until), device=device)


def attention(
    query: Tensor, key: Tensor, value: Tensor, past: Sequence[tuple[Tensor, Tensor, int]], mask: BlockMask, scale: float
) -> Tensor:
    """Output (1, heads, N, width) of a piece's N tokens; see `cpu.attention`."""
    keys = torch.cat([*(one[0] for one in past), key], 2)
    values = torch.cat([*(one[1] for one in past), value], 2)
    run = _compiled() if query.is_cuda else flex_attention
    grouped = query.shape[1] != key.shape[1]
    return run(query.contiguous(), keys, values, block_mask=mask, scale=scale, enable_gqa=grouped)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
