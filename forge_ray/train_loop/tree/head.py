"""Log-probabilities and entropies of a piece's emissions, inside the model's output head.

For the time of a forward pass the head answers two numbers per emission instead of a row of logits per token. Rows are those that predict
something, each once per temperature, however many emissions they predict; they go through the head a chunk at a time, and where there is
more than one chunk their logits are made again in the backward, so that at most one chunk of rows × vocabulary is alive. An engine that
gathers weights by module hooks sees one call of the head, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor

LOGITS_AT_ONCE = 2**22
"""Rows × vocabulary of a chunk."""
ROWS_AT_LEAST = 256


class Targets:
    """What the head is asked for: m emissions on r rows."""

    def __init__(self, at: np.ndarray, token: np.ndarray, temperature: np.ndarray, device: torch.device) -> None:
        """`at`: index of the predicting token in the piece. All (m,)."""
        order = np.lexsort((temperature, at))
        at, token, temperature = at[order], token[order], temperature[order]
        new = np.ones(len(at), bool)
        new[1:] = (np.diff(at) != 0) | (np.diff(temperature) != 0)

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        self.rows, self.temperature = on_device(at[new]), on_device(temperature[new])
        self.of_emission = new.cumsum() - 1
        self.row, self.token = on_device(self.of_emission), on_device(token)
        self.back = on_device(np.argsort(order, kind="stable"))

    def __len__(self) -> int:
        return len(self.of_emission)


@contextmanager
def answering(head: torch.nn.Module, targets: Targets, *, entropy_gradient: bool) -> Iterator[None]:
    """Within, `head` maps hidden states (1, N, width) to (1, m, 2): logprob and entropy of the emissions, nats, float32 (or float64).

    Without an emission it is (1, 1, 2) of a row that nobody asked for: a backward through it, times 0, reaches every weight.
    """
    before = head.__dict__.get("forward")
    project = head.forward

    def forward(hidden: Tensor) -> Tensor:
        return scores(project, hidden, targets, entropy_gradient).unsqueeze(0)

    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def scores(project: Callable[[Tensor], Tensor], hidden: Tensor, targets: Targets, entropy_gradient: bool) -> Tensor:
    """(m, 2), in the order that the emissions were given in."""

    def chunk(rows: Tensor, temperature: Tensor, row: Tensor, token: Tensor) -> Tensor:
        logits = project(rows)[0]
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature.to(logits.dtype).unsqueeze(1)
        normaliser = logits.logsumexp(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = normaliser - ((logits - normaliser.unsqueeze(1)).exp() * logits).sum(-1)
        return torch.stack([logits[row, token] - normaliser[row], entropy[row]], -1)

    if not len(targets):
        nothing = torch.zeros(1, dtype=torch.long, device=hidden.device)
        return chunk(hidden[:, -1:], torch.ones(1, device=hidden.device), nothing, nothing)
    needed = hidden[:, targets.rows]
    count = len(targets.rows)
    at_once = max(ROWS_AT_LEAST, LOGITS_AT_ONCE // _width(project))
    if count <= at_once:
        return chunk(needed, targets.temperature, targets.row, targets.token)[targets.back]
    found = []
    for first in range(0, count, at_once):
        begin, end = np.searchsorted(targets.of_emission, [first, first + at_once])
        given: Any = (
            needed[:, first : first + at_once], targets.temperature[first : first + at_once],
            targets.row[begin:end] - first, targets.token[begin:end],
        )  # fmt: skip
        found.append(torch.utils.checkpoint.checkpoint(chunk, *given, use_reentrant=False))
    return torch.cat(found)[targets.back]


def _width(project: Any) -> int:
    """Size of the vocabulary."""
    head = getattr(project, "__self__", None)
    return int(getattr(head, "out_features", 0) or 2**17)
