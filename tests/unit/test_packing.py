"""Packed rows: every sequence has the log-probabilities and gradients that it has alone, and sees nothing of its neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config

from forge_ray.train_loop import attention, forward, models
from forge_ray.train_loop.forward import Row
from forge_ray.train_loop.part import Passes, Work
from forge_ray.train_loop.rows import Rows
from tests.unit import learning

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": learning.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip


def small(kind: str) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))


def made(lengths: list[int], seed: int = 0) -> list[Row]:
    draw = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        ids = draw.integers(0, learning.VOCABULARY, length)
        count = max(1, (length - 1) // 2)
        positions = np.sort(draw.choice(np.arange(1, length), count, replace=False))
        ones = np.ones(count, np.float32)
        rows.append(
            Row(f"r{number}", ids, positions, 0 * ones, ones, ones, ones * (0.7 if number % 2 else 1.0), np.zeros(count, int), count)
        )
    return rows


def alone(model: Any, row: Row) -> torch.Tensor:
    """The plain way: one sequence, no mask, no packing, torch's own attention."""
    logits = model(torch.tensor(row.ids)[None]).logits[0, torch.tensor(row.positions) - 1]
    logprobs = (logits / torch.tensor(row.temperature)[:, None]).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(row.ids[row.positions])[:, None])[:, 0]


def gradients(model: Any) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tokens", [30, 100_000])
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(kind: str, checkpointing: bool, tokens: int) -> None:
    model, rows = small(kind), made([3, 40, 17, 2, 17, 9, 33, 8, 16, 2])
    expected = torch.cat([alone(model, row) for row in rows])
    expected.sum().backward()
    wanted = gradients(model)
    assert models.prepare(model, learning.config(gradient_checkpointing=checkpointing).train)
    part, passes = Rows(rows), Passes(CPU, tokens, packed=True)
    np.testing.assert_allclose(part.score(model, passes), expected.detach().numpy(), atol=1e-5, rtol=0)
    part.accumulate(Work(model, passes, lambda inputs: inputs.logprobs.sum(), lambda share, last: share.backward(), 0))
    whole = torch.cat([g.flatten() for g in wanted]).norm()
    difference = torch.cat([(one - other).flatten() for one, other in zip(gradients(model), wanted, strict=True)]).norm()
    assert difference / whole < 1e-6


def test_a_sequence_sees_nothing_of_its_neighbours() -> None:
    """Other neighbours leave every bit as it is."""
    model = small("llama")
    attention.use(model)
    row = made([12])[0]
    scores = []
    for seed in range(3):
        others = made([20, 14, 12, 12, 6], seed=seed + 1)
        scores.append(Rows([*others[:3], row, *others[3:]]).score(model, Passes(CPU, 1000, packed=True)))
    first = sum(len(other.positions) for other in made([20, 14, 12]))
    own = [score[first : first + len(row.positions)] for score in scores]
    assert np.array_equal(own[0], own[1]) and np.array_equal(own[0], own[2])
    assert not np.allclose(scores[0][:first], scores[1][:first])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_groups_hold_every_sequence_once_and_waste_little(lengths: list[int]) -> None:
    lengths = sorted(lengths, reverse=True)
    found = attention.segments(lengths)
    assert [index for first, last, _ in found.groups for index in range(first, last)] == list(range(len(lengths)))
    for first, last, longest in found.groups:
        assert longest == max(lengths[first:last])
        assert sum(lengths[first:last]) >= (1 - attention.WASTE) * longest * (last - first)
    assert found.spans == tuple(zip(found.starts.tolist(), lengths, strict=True))


@given(st.lists(st.integers(2, 50), max_size=20), st.integers(1, 120))
@settings(max_examples=100, deadline=None)
def test_packed_micro_batches_hold_every_row_once_within_the_bound(lengths: list[int], bound: int) -> None:
    rows = made(lengths)
    cuts = forward.cuts(rows, bound, packed=True)
    assert sorted(index for cut in cuts for index in cut) == list(range(len(rows)))
    assert all(len(cut) == 1 or sum(len(rows[index]) for index in cut) <= bound for cut in cuts)
    assert len(cuts) <= len(forward.cuts(rows, bound))


def test_models_whose_attention_cannot_be_cut_so_are_padded() -> None:
    for config, can in (
        (LlamaConfig(**SIZES), True),
        (Qwen3Config(**SIZES), True),
        (MistralConfig(**SIZES, sliding_window=16), False),
        (MistralConfig(**SIZES, sliding_window=None), True),
        (Gemma2Config(**SIZES), False),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1), False),
    ):
        assert (attention.supports(config) is None) == can, config
