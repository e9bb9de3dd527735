"""What a model's attention layers call for a piece of a forest, and the keys and values that pieces hand on.

Registered with transformers' AttentionInterface under `NAME`, so any model whose attention goes through it takes part unchanged; a name
without a mask function of its own is given no mask. The piece comes as the keyword argument `tree` that the model's forward hands down.

Gradients of handed-on keys and values do not flow through autograd from piece to piece (each piece has its own backward): a piece sees
them as leaves, whose gradients are added up where they are held, and the backward of the piece that holds them adds the sum to its own.
So a piece's backward takes one scalar, whatever engine runs it, and gradient checkpointing may run its forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from forge_ray.errors import ForgeRayError
from forge_ray.train_loop.tree import cpu
from forge_ray.train_loop.tree.pieces import Own, Past

NAME = "forge_ray_tree"
"""`attn_implementation` of the models that train on tries."""


class AttentionRefused(ForgeRayError):
    """A layer whose attention is not the plain one."""


class Held:
    """Keys and values, by layer, of a piece's tokens that later pieces see; (1, heads, tokens, width) each, after the rotary embedding."""

    def __init__(self, tokens: np.ndarray, of: int, device: torch.device) -> None:
        self._index = None if len(tokens) == of else torch.from_numpy(tokens).to(device)
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """What the piece computed; of a second forward it is the same."""
        if layer not in self._values:
            pair = key.detach(), value.detach()
            self._values[layer] = (
                pair if self._index is None else (pair[0].index_select(2, self._index), pair[1].index_select(2, self._index))
            )

    def leaves(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Tokens [first, end) for one later piece; their gradients come back here."""
        key, value = (held[:, :, first:end].detach() for held in self._values[layer])
        if torch.is_grad_enabled():
            for number, leaf in enumerate((key, value)):

                def add(leaf: Tensor, number: int = number) -> None:
                    assert leaf.grad is not None
                    self._gradient(layer)[number][:, :, first:end] += leaf.grad
                    leaf.grad = None

                leaf.requires_grad_().register_post_accumulate_grad_hook(add)
        return key, value

    def returned(self, layer: int, number: int, of: Tensor) -> Tensor:
        """`of`, the gradient of the piece's own keys (0) or values (1), with what later pieces sent back."""
        if layer not in self._gradients:
            return of
        sent = self._gradients[layer][number].to(of.dtype)
        return of + sent if self._index is None else of.index_add(2, self._index, sent)

    def _gradient(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self._gradients:
            # Sums over many pieces: not in a half precision.
            key, value = (torch.zeros_like(held, dtype=torch.promote_types(held.dtype, torch.float32)) for held in self._values[layer])
            self._gradients[layer] = key, value
        return self._gradients[layer]


@dataclass
class View:
    """A piece as the attention layers see it."""

    past: Sequence[Past]
    own: Sequence[Own]
    held: Held | None
    """Where the piece leaves keys and values; None: no later piece sees it."""
    holders: dict[int, Held] = field(default_factory=dict)
    """By piece: what the earlier ones left."""
    mask: Any = None
    """FlexAttention's, made by the first layer."""
    layers: int = 0
    """Attention layers that were called."""


class _Shared(torch.autograd.Function):
    """Keys or values on their way through the piece that holds them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, held: Held, layer: int, number: int) -> Tensor:
        ctx.held = held, layer, number
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        held, layer, number = ctx.held
        return held.returned(layer, number, gradient), None, None, None


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, tree: View, scaling: float | None = None,
    dropout: float = 0.0, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: (1, heads, N, width) each; the output is (1, N, heads, width)."""
    if dropout or attention_mask is not None:
        raise AttentionRefused(f"{type(module).__name__}: attention with {'dropout' if dropout else 'a mask'} cannot train on tries")
    for name in ("sliding_window", "softcap", "s_aux"):
        if more.get(name) is not None:
            raise AttentionRefused(f"{type(module).__name__}: attention with {name} cannot train on tries")
    layer = module.layer_idx
    if torch.is_autocast_enabled(query.device.type):
        # As scaled_dot_product_attention has it; some models normalise queries and keys in float32.
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    if tree.held is not None:
        tree.held.keep(layer, key, value)
        if torch.is_grad_enabled():
            key, value = (_Shared.apply(tensor, tree.held, layer, number) for number, tensor in enumerate((key, value)))
    past = [(*tree.holders[one.piece].leaves(layer, one.first, one.end), one.until) for one in tree.past]
    tree.layers += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda:
        from forge_ray.train_loop.tree import flex

        tree.mask = tree.mask or flex.block_mask(tree.past, tree.own, query.device)
        out = flex.attention(query, key, value, past, tree.mask, scale)
    else:
        out = cpu.attention(query, key, value, past, tree.own, scale)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, tree_attention)
