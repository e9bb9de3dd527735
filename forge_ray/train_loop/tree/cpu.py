"""Attention of a piece on CPUs: one call of torch's flash kernel per segment, or plain torch where torch has no such kernel.

A segment's keys are contiguous, and so are the queries below it; a causal call with more queries than keys, aligned at the top left, means
"the segment's own tokens causally, those below see all of it". The calls' results are merged by their log-sum-exp (Dao et al.,
FlashAttention, arXiv 2205.14135, section 3.1), and with the merged output and log-sum-exp each call's backward is its part of the whole's.

The two kernels are torch's own and private, and this is the only module that knows them. `gather_attention` needs nothing but
`scaled_dot_product_attention`: each segment's queries against the keys above it, gathered, and its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_ray.train_loop.tree.pieces import Own

_PACKET = "_scaled_dot_product_flash_attention_for_cpu"
Keys = tuple[Tensor, Tensor, int]
"""Keys and values (1, heads, n, width) that come before a piece, and how many of its queries see them."""


def has_flash_kernels() -> bool:
    """Whether this torch has both kernels."""
    return hasattr(torch.ops.aten, _PACKET) and hasattr(torch.ops.aten, f"{_PACKET}_backward")


def attention(query: Tensor, key: Tensor, value: Tensor, past: Sequence[Keys], own: Sequence[Own], scale: float) -> Tensor:
    """Output (1, heads, N, width) of a piece's N tokens; `key` and `value` may have fewer heads. Chooses the implementation."""
    if has_flash_kernels() and query.shape[-1] == value.shape[-1]:
        return flash_attention(query, key, value, past, own, scale)
    return gather_attention(query, key, value, past, own, scale)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, past: Sequence[Keys], own: Sequence[Own], scale: float) -> Tensor:
    """By the private kernels."""
    flat = [tensor for keys, values, _ in past for tensor in (keys, values)]
    return _Flash.apply(query, key, value, tuple(seen for _, _, seen in past), tuple(own), scale, *flat)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Any, own: Any, scale: float, *past: Tensor) -> Tensor:
        forward = getattr(torch.ops.aten, _PACKET)
        batch, heads, count, width = query.shape
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        # The kernel's own layout, so that its backward need not copy.
        out = torch.empty(batch, count, heads, width, dtype=kind).transpose(1, 2)
        lse = torch.empty(batch, count, heads, dtype=kind).transpose(1, 2)
        covered = 0
        for first, end, keys, values, causal in _calls(key, value, seen, own, past):
            part, sums = forward(query[:, :, first:end], keys, values, 0.0, causal, scale=scale)
            if first >= covered:
                out[:, :, first:end], lse[:, :, first:end] = part, sums
                covered = end
                continue
            # Subtrees nest, so what is not the first for some of these queries is so for none.
            before, merged = lse[:, :, first:end], out[:, :, first:end]
            both = torch.logaddexp(before, sums)
            merged.mul_((before - both).exp_().unsqueeze(-1)).add_(part * (sums - both).exp_().unsqueeze(-1))
            before.copy_(both)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, *past)
        ctx.how = seen, own, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        backward = getattr(torch.ops.aten, f"{_PACKET}_backward")
        query, key, value, out, lse, *past = ctx.saved_tensors
        seen, own, scale = ctx.how
        of_query = torch.zeros_like(query)
        found: list[Tensor] = []
        for first, end, keys, values, causal in _calls(key, value, seen, own, past):
            part = backward(
                gradient[:, :, first:end], query[:, :, first:end], keys, values, out[:, :, first:end], lse[:, :, first:end], 0.0, causal,
                scale=scale,
            )  # fmt: skip
            of_query[:, :, first:end] += part[0]
            found += part[1:]
        before = 2 * len(seen)
        of_key, of_value = torch.cat(found[before::2], 2), torch.cat(found[before + 1 :: 2], 2)
        return of_query, of_key, of_value, None, None, None, *found[:before]


def _calls(key: Tensor, value: Tensor, seen: Sequence[int], own: Sequence[Own], past: Sequence[Tensor]) -> Any:
    """The kernel calls of a piece: (first query, end of queries, keys, values, causal)."""
    for number, queries in enumerate(seen):
        yield 0, queries, past[2 * number], past[2 * number + 1], False
    for start, end, until in own:
        yield start, until, key[:, :, start:end], value[:, :, start:end], True


def gather_attention(query: Tensor, key: Tensor, value: Tensor, past: Sequence[Keys], own: Sequence[Own], scale: float) -> Tensor:
    """By public operations alone; 1 to 2.6 times the time of the kernels."""
    outputs: list[Tensor] = []
    above: list[Own] = []
    for segment in own:
        while above and above[-1].until <= segment.start:
            above.pop()
        keys = [keys for keys, _, seen in past if seen > segment.start] + [key[:, :, one.start : one.end] for one in above]
        values = [values for _, values, seen in past if seen > segment.start] + [value[:, :, one.start : one.end] for one in above]
        length = segment.end - segment.start
        gathered = sum(one.shape[2] for one in keys)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, segment.start : segment.end],
                torch.cat([*keys, key[:, :, segment.start : segment.end]], 2),
                torch.cat([*values, value[:, :, segment.start : segment.end]], 2),
                attn_mask=torch.ones(length, gathered + length, dtype=torch.bool, device=query.device).tril(gathered) if gathered else None,
                is_causal=not gathered,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
        above.append(segment)
    return torch.cat(outputs, 2)
