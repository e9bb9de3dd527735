"""From rows of a table to log-probabilities: rows, micro-batches, the forward pass.

Invariants:
- **Masks come from lengths.** Rows are padded on the right with their own last token; no token id means "padding" anywhere, so a pad id
  that is also the end token hides nothing. Padded positions are never a target and no real position attends to them.
- **Only needed positions have logits.** The output head sees the hidden states in front of trained tokens, not rows x length of them.
- Log-probabilities are those of the distribution that was sampled from: log_softmax(logits / recorded temperature), in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from forge_ray.errors import ForgeRayError
from forge_ray.train_loop.attention import Segments, segments
from forge_ray.train_loop.losses import LossInputs, Total
from forge_ray.trajectories.split import partition


class RowError(ForgeRayError):
    """A row of a table that cannot be trained on."""


@dataclass
class Row:
    """One sequence and its trained positions (n of them; each at least 1: a token without context has no probability)."""

    name: str
    """Trajectory: the rollout id, or the demonstration's number."""
    ids: np.ndarray
    """int64, (T,)."""
    positions: np.ndarray
    """int64, (n,), rising: indices into `ids` of the tokens in the loss."""
    old_logprobs: np.ndarray
    """float32, (n,)."""
    advantages: np.ndarray
    weights: np.ndarray
    temperature: np.ndarray
    steps: np.ndarray
    """int64, (n,): version step of the weights that sampled the token; -1 in a demonstration."""
    trajectory_tokens: int = 0
    """Trained tokens of the whole trajectory, over all its rows."""
    calls: np.ndarray | None = None
    """int32, (n,): ordinal of the call that sampled the token, which no other row of the trajectory has. None: the row is one sequence."""
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    """float32, (n,) each, by the field of `LossInputs` that they become: log-probabilities under other policies."""

    def __len__(self) -> int:
        return len(self.ids)


def rows(table: pa.Table) -> list[Row]:
    """The rows of a table of samples that have a token in the loss, in order. The table holds trajectories whole (as `split` cuts it)."""
    columns = {name: _lists(table, name) for name in ("ids", "weight", "mask", "logprobs", "advantage", "temperature", "steps", "call")}
    found = []
    for index, name in enumerate(table.column("rollout").to_pylist()):
        trained = columns["weight"][index] > 0
        if not trained.any():
            continue
        if not columns["mask"][index][trained].all():
            raise RowError(f"row {index} (rollout {name}) weighs a token that was not sampled")
        found.append(
            Row(
                name=name,
                ids=columns["ids"][index].astype(np.int64),
                positions=np.flatnonzero(trained),
                old_logprobs=columns["logprobs"][index][trained],
                advantages=columns["advantage"][index][trained],
                weights=columns["weight"][index][trained],
                temperature=columns["temperature"][index][trained],
                steps=columns["steps"][index][trained].astype(np.int64),
                calls=columns["call"][index][trained],
            )
        )
    return _finish(found)


def demonstration_rows(table: pa.Table) -> list[Row]:
    """Rows of a table of demonstrations (`ids`, `mask`: lists of equal length); those without a trained token are left out."""
    ids, masks = _lists(table, "ids"), _lists(table, "mask")
    found = []
    for index, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
        if len(tokens) != len(mask):
            raise RowError(f"demonstration {index}: {len(tokens)} ids and {len(mask)} mask values")
        positions = np.flatnonzero(mask.astype(bool))
        if not len(positions):
            continue
        count = len(positions)
        zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
        found.append(Row(str(index), tokens.astype(np.int64), positions, zeros, ones, ones, ones, np.full(count, -1), count))
    return _finish(found)


def total(rows: Sequence[Row]) -> Total:
    """What these rows train; add that of other ranks (they hold other trajectories) before dividing."""
    sequences = sum(1 if row.calls is None else len(np.unique(row.calls)) for row in rows)
    return Total(sum(len(row.positions) for row in rows), len({row.name for row in rows}), sequences)


def minibatches(rows: Sequence[Row], parts: int, seed: int | str | None = None) -> list[list[Row]]:
    """The rows in `parts` sets, one per optimizer step of a pass: whole trajectories, balanced by tokens, drawn by `seed`.

    Sets may be empty: every rank makes the same number of optimizer steps.
    """
    trajectories: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        trajectories[row.name].append(index)
    members = list(trajectories.values())
    shares = partition([sum(len(rows[index]) for index in group) for group in members], parts, seed=seed)
    return [[rows[index] for group in share for index in members[group]] for share in shares]


@dataclass
class Microbatch:
    """Tensors of one forward pass: `rows` padded sequences of length T with n trained positions over all of them."""

    input_ids: Tensor
    """int64, (rows, T)."""
    attention_mask: Tensor | None
    """int64, (rows, T): 1 on the first `lengths[i]` positions. None where the rows are packed."""
    packed: Segments | None
    """The rows stand end to end in one, (1, T), and see nothing of each other (`attention`)."""
    position_ids: Tensor | None
    """int64, (1, T) of packed rows: each token's place in its own."""
    at_row: Tensor
    """int64, (n,): row of each trained token."""
    at_position: Tensor
    """int64, (n,): position of each trained token, at least 1."""
    targets: Tensor
    """int64, (n,)."""
    temperature: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    steps: Tensor
    """int64, (n,)."""
    trajectory: Tensor
    """int64, (n,): number of each token's trajectory in this part."""
    trajectory_tokens: Tensor
    """float32, (n,)."""
    sequence: Tensor
    """int64, (n,): number of each token's call in this part."""
    names: list[str]
    """Trajectory of each row."""
    scores: dict[str, Tensor]
    """(n,) each: `Row.scores`."""

    def describe(self, index: int) -> str:
        """Trained position `index`, for a person."""
        row = int(self.at_row[index])
        return f"{self.names[row]}, token {int(self.at_position[index])}"

    def loss_inputs(self, logprobs: Tensor, step: int | None = None, **more: Tensor | None) -> LossInputs:
        """What the losses are given: `logprobs` (n,) of the policy, what was recorded, and `more` of it by name.

        `step`: version of the policy under training, for the tokens' staleness.
        """
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            weights=self.weights,
            sequence=self.sequence,
            trajectory=self.trajectory,
            trajectory_tokens=self.trajectory_tokens,
            position=self.at_position,
            staleness=None if step is None else step - self.steps,
            describe=self.describe,
            **{**self.scores, **more},
        )


def cuts(rows: Sequence[Row], max_tokens: int, *, packed: bool = False) -> list[list[int]]:
    """Which rows go together in a micro-batch of at most `max_tokens` tokens, padding counted (a longer row goes alone); longest first."""
    made: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index])):
        tokens += len(rows[index]) if packed or not made else len(rows[made[-1][0]])
        if made and tokens <= max_tokens:
            made[-1].append(index)
        else:
            made.append([index])
            tokens = len(rows[index])
    return made


def collate(rows: Sequence[Row], device: torch.device | str = "cpu", *, packed: bool = False, scores: Sequence[str] = ()) -> Microbatch:
    """One micro-batch of these rows: padded on the right, or packed, longest first. `scores`: which of the rows' scores it has.

    Without a row it has no trained position, a loss of 0, and a backward that reaches every weight with a zero gradient, so that a rank
    without work still takes part in the collective calls.
    """
    lengths = [len(row) for row in rows] or [1]
    if packed:
        ids = np.concatenate([row.ids for row in rows])[None] if rows else np.zeros((1, 1), np.int64)
        attention = None
    else:
        ids = np.zeros((len(lengths), max(lengths)), np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row.ids
            # A token of the row itself: attention multiplies masked values by 0, which would let a NaN of some other token's embedding
            # through.
            ids[index, len(row) :] = row.ids[-1]
        attention = np.arange(ids.shape[1])[None, :] < np.asarray(lengths)[:, None]

    def per_token(values: list[np.ndarray], kind: type) -> Tensor:
        return torch.from_numpy(np.concatenate([*values, np.zeros(0, kind)]).astype(kind, copy=False)).to(device)

    numbers = {name: number for number, name in enumerate(dict.fromkeys(row.name for row in rows))}
    sequences: list[np.ndarray] = []
    known = 0
    for row in rows:
        own = np.zeros(len(row.positions), np.int64) if row.calls is None else np.unique(row.calls, return_inverse=True)[1]
        sequences.append(known + own)
        known += int(own.max(initial=-1)) + 1

    return Microbatch(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=None if attention is None else torch.from_numpy(attention.astype(np.int64)).to(device),
        packed=segments(lengths, device) if packed else None,
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])[None]).to(device) if packed else None,
        at_row=per_token([np.full(len(row.positions), index) for index, row in enumerate(rows)], np.int64),
        at_position=per_token([row.positions for row in rows], np.int64),
        targets=per_token([row.ids[row.positions] for row in rows], np.int64),
        temperature=per_token([row.temperature for row in rows], np.float32),
        old_logprobs=per_token([row.old_logprobs for row in rows], np.float32),
        advantages=per_token([row.advantages for row in rows], np.float32),
        weights=per_token([row.weights for row in rows], np.float32),
        steps=per_token([row.steps for row in rows], np.int64),
        trajectory_tokens=per_token([np.full(len(row.positions), row.trajectory_tokens) for row in rows], np.float32),
        trajectory=per_token([np.full(len(row.positions), numbers[row.name]) for row in rows], np.int64),
        sequence=per_token(sequences, np.int64),
        names=[row.name for row in rows],
        scores={name: per_token([row.scores[name] for row in rows], np.float32) for name in scores},
    )


def token_logprobs(
    model: torch.nn.Module, batch: Microbatch, *, entropy: bool = False, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (nats, float32, (n,)) of every trained token, and the entropy of its distribution where asked for.

    `model` is a Hugging Face causal language model, or DDP around one. Gradients flow unless the caller turned them off; the entropy's,
    whose graph holds two values for each trained token and entry of the vocabulary, only with `entropy_gradient`.
    """
    head = _head(model)

    def needed(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # (rows, T, hidden) -> (1, n, hidden). What the model does to its logits afterwards (soft caps, scales) stays the model's own.
        if batch.packed is not None:
            return (args[0][:, batch.packed.starts[batch.at_row] + batch.at_position - 1], *args[1:])
        return (args[0][batch.at_row, batch.at_position - 1].unsqueeze(0), *args[1:])

    given = {} if batch.packed is None else {"position_ids": batch.position_ids, "segments": batch.packed}
    hook = head.register_forward_pre_hook(needed)
    try:
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **given)
    finally:
        hook.remove()
    logits = output.logits[0].float() / batch.temperature.unsqueeze(1)
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(1, batch.targets.unsqueeze(1)).squeeze(1) - normaliser
    if not entropy:
        return logprobs, None
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        return logprobs, normaliser - ((logits - normaliser.unsqueeze(1)).exp() * logits).sum(-1)


def _head(model: torch.nn.Module) -> torch.nn.Module:
    inner = getattr(model, "module", model)
    embeddings: Any = getattr(inner, "get_output_embeddings", None)
    head = embeddings() if embeddings is not None else None
    if head is None:
        raise RowError(f"{type(inner).__name__} has no output head: a causal language model is needed")
    return head


def _finish(found: list[Row]) -> list[Row]:
    counts: dict[str, int] = defaultdict(int)
    for row in found:
        if row.positions[0] < 1:
            raise RowError(f"{row.name}: the first token of a sequence cannot be trained")
        counts[row.name] += len(row.positions)
    for row in found:
        row.trajectory_tokens = counts[row.name]
    return found


def _lists(table: pa.Table, name: str) -> list[np.ndarray]:
    """A column of lists as one array per row."""
    column = table.column(name).combine_chunks()
    lengths = np.asarray(column.value_lengths(), dtype=np.int64)
    values = column.flatten().to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
