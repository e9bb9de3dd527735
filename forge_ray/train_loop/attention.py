"""Attention over packed rows: several sequences end to end in one row, none of which sees another.

Registered with transformers under `NAME`; the lengths come with the call (`segments`). A name without a mask function gets no mask, so
nothing of size (row length)² is made. Each sequence is one causal call of torch's SDPA; short ones of about the same length go side by
side, padded inside the attention alone, so that neither their number nor their padding costs much. Without `segments` the rows are
sequences of their own, padded on the right, where a causal mask is mask enough: what a padded position computes nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "forge_ray_packed"
WASTE = 0.25
"""Largest share of padding inside a group of sequences that attend side by side."""


@dataclass(frozen=True)
class Segments:
    """How a packed row of T tokens falls into sequences."""

    groups: tuple[tuple[int, int, int], ...]
    """(first, last, longest): sequences first … last − 1 attend together, padded to `longest` tokens."""
    starts: Tensor
    """int64, (sequences,), rising: where each begins."""
    lengths: Tensor
    """int64, (sequences,)."""
    spans: tuple[tuple[int, int], ...]
    """The same as numbers: (start, length)."""


def segments(lengths: Sequence[int], device: torch.device | str = "cpu") -> Segments:
    """Of sequences that stand end to end, longest first (else the groups are only smaller)."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    groups: list[tuple[int, int, int]] = []
    first = 0
    while first < len(lengths):
        longest, real, last = lengths[first], lengths[first], first + 1
        while last < len(lengths):
            wide = max(longest, lengths[last])
            if (real + lengths[last]) < (1 - WASTE) * wide * (last + 1 - first):
                break
            longest, real, last = wide, real + lengths[last], last + 1
        groups.append((first, last, longest))
        first = last
    spans = tuple(zip(starts[:-1], lengths, strict=True))
    return Segments(tuple(groups), torch.tensor(starts[:-1], device=device), torch.tensor(list(lengths), device=device), spans)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (rows, heads, T, d), key and value (rows, kv heads, T, d); returns (rows, T, heads, d)."""
    grouped = key.shape[1] != query.shape[1]

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped)

    if segments is None:
        return causal(query, key, value).transpose(1, 2).contiguous(), None
    parts = [_group(causal, query, key, value, segments, group) for group in segments.groups]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return whole, None


def _group(causal: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, group: tuple[int, int, int]) -> Tensor:
    """The group's part of the row, (1, tokens, heads, d)."""
    first, last, longest = group
    start, (tail, length) = segments.spans[first][0], segments.spans[last - 1]
    end = tail + length
    count = last - first
    if count == 1 or (end - start) == count * longest:  # nothing to pad: views
        side_by_side = (tensor[0, :, start:end].unflatten(1, (count, longest)).transpose(0, 1) for tensor in (query, key, value))
        out = causal(*side_by_side)
        return out.transpose(1, 2).reshape(1, end - start, query.shape[1], -1)
    begin, lengths = segments.starts[first:last, None], segments.lengths[first:last, None]
    offsets = torch.arange(longest, device=query.device)[None]
    inside = offsets < lengths
    # Padding repeats the sequence's last token: keys that no real query sees, and finite.
    index = begin + torch.minimum(offsets, lengths - 1)
    gathered = (tensor[0].transpose(0, 1)[index].transpose(1, 2) for tensor in (query, key, value))
    out = causal(*gathered)
    return out.transpose(1, 2)[inside].unsqueeze(0)


def supports(config: Any) -> str | None:
    """Why a model of this config cannot attend this way; None if it can."""
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps its attention's logits"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None)
    if kinds != {"full_attention"} or (window is not None and getattr(text, "use_sliding_window", True)):
        return "it has layers with a window, or without attention"
    if getattr(text, "is_encoder_decoder", False):
        return "it has an encoder"
    return None


def use(model: Any) -> None:
    """Make a transformers model attend this way."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)
