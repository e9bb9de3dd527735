"""Which models tree training is exact for, and how one is switched to it.

Exact for every causal language model of transformers whose attention goes through its AttentionInterface and where a token's numbers
depend on the tokens above it alone. So these are refused: sliding windows and other kinds of layers (what a token sees would depend on
distances that pieces do not know), dropout (a shared token would be dropped once instead of once per call), and losses that a mixture of
experts adds from the statistics of a batch (tokens that calls share would count once).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from forge_ray.errors import UserError
from forge_ray.train_loop.tree.attention import NAME, AttentionRefused, View
from forge_ray.train_loop.tree.head import Targets, answering
from forge_ray.train_loop.tree.pieces import Own

WHERE = "train.builder = tree"
FIX = "set train.builder=chain"


def language_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model in DDP, an engine, or adapters."""
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None or found.get_output_embeddings() is None:
        raise UserError(f"{type(model).__name__} is no causal language model of transformers", where=WHERE, fix=FIX)
    return found


def check(model: torch.nn.Module) -> None:
    """Raise `UserError` for a model that would not be trained exactly. Makes a forward pass of two tokens (on every rank alike)."""
    inner = check_kind(model)
    _probe(model, inner, inner.config.get_text_config(), type(inner).__name__)


def check_kind(model: torch.nn.Module) -> PreTrainedModel:
    """What of `check` the model's classes and config tell, its weights aside; the transformers model in `model`."""
    inner = language_model(model)
    config: Any = inner.config.get_text_config()
    name = type(inner).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "layer_types", None) and window is not None and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    if kinds:
        _refuse(f"{name} has layers of kind {', '.join(sorted(kinds))}")
    if any(isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()):
        _refuse(f"{name} trains with dropout")
    if getattr(config, "attention_dropout", 0):
        _refuse(f"{name} trains with attention_dropout = {config.attention_dropout}")
    if getattr(config, "output_router_logits", False):
        _refuse(f"{name} adds a balance loss of its experts (output_router_logits)")
    if not inner._can_set_attn_implementation():
        _refuse(f"the attention of {name} does not go through transformers' AttentionInterface")
    return inner


def _probe(model: torch.nn.Module, inner: PreTrainedModel, config: Any, name: str) -> None:
    """What only running it shows: all layers call our attention, and nothing is done to the head's answer."""
    device = next(inner.parameters()).device
    view = View((), (Own(0, 2, 2),), None)
    targets = Targets(np.array([0, 1]), np.array([0, 0]), np.ones(2, np.float32), device)
    seen: list[torch.Tensor] = []
    head: Any = inner.get_output_embeddings()
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        with switched(model), torch.no_grad(), answering(head, targets, entropy_gradient=False):
            hook = head.register_forward_hook(lambda _module, _given, answer: seen.append(answer.clone()))
            try:
                logits = model(input_ids=ids, position_ids=torch.arange(2, device=device)[None], use_cache=False, tree=view).logits
            finally:
                hook.remove()
    except AttentionRefused as error:
        _refuse(str(error))
    layers = getattr(config, "num_hidden_layers", None)
    if view.layers != layers:
        _refuse(f"{view.layers} of the {layers} layers of {name} call transformers' AttentionInterface")
    if len(seen) != 1 or logits.shape != seen[0].shape or not torch.equal(logits, seen[0]):
        _refuse(f"{name} changes its logits behind the output head")


def _refuse(what: str) -> None:
    raise UserError(f"{what}: tree training would not be exact", where=WHERE, fix=FIX)


@contextmanager
def switched(model: torch.nn.Module) -> Iterator[None]:
    """Within, the model's attention is that of pieces."""
    inner = language_model(model)
    before: Any = inner.config._attn_implementation
    inner.set_attn_implementation(NAME)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)
