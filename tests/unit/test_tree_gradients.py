"""Training on tries gives the gradients of training call by call: small random models, float64 to 1e-9 and float32 to 1e-5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from forge_ray.config import Loss
from forge_ray.errors import UserError
from forge_ray.train_loop.part import Passes
from forge_ray.train_loop.tree import attention, cpu, flex, model, pieces
from forge_ray.train_loop.tree.tries import Tries
from tests.unit.tries import (
    CPU,
    Sampled,
    by_tree,
    call_by_call,
    distance,
    exact_norms,
    losses,
    random_calls,
    session,
    small_model,
    taken,
    trie,
)

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    torch.set_num_threads(1)
    with exact_norms():
        yield


def compared(
    net: Any, calls: list[Sampled], config: Loss, budget: int, reference: Any = None, *, faulty: bool = False, **changes: Any
) -> float:
    """Distance of the trie's gradients to those of call by call; the losses are the same unless a fault was made."""
    one = trie(calls)
    total = one.total()
    wanted = call_by_call(net, calls, config, total, reference)
    of_calls = taken(net)
    part = Tries(replace(one, **changes), budget)
    if reference is not None:
        part = part.with_scores("reference_logprobs", part.score(reference, Passes(CPU, 4096)))
    got = by_tree(net, part, config, total)
    assert faulty or got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    return distance(taken(net), of_calls)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_random_tries(kind: str, dtype: torch.dtype) -> None:
    net, reference = small_model(kind, dtype), small_model(kind, dtype, seed=1)
    for seed in range(12):
        calls = random_calls(np.random.default_rng(seed))
        budget, kl = (8, 40, 4096)[seed % 3], 0.01 * (seed % 2)
        assert compared(net, calls, losses(kl=kl), budget, reference if kl else None) < BOUNDS[dtype], (seed, budget)


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_sessions_as_agents_leave_them(dtype: torch.dtype, strip: bool) -> None:
    net = small_model("qwen3", dtype)
    draw = np.random.default_rng(3)
    calls = [call for rollout in range(2) for call in session(draw, rollout, turns=6, strip=strip, scale=2)]
    for budget in (60, 200, 4096):
        assert compared(net, calls, losses(), budget) < BOUNDS[dtype], budget


def test_a_session_of_four_thousand_tokens_in_float32() -> None:
    net = small_model("qwen3", torch.float32)
    calls = session(np.random.default_rng(4), 0, turns=10, strip=True, scale=22)
    assert 3500 < len(trie(calls)) < 4500
    assert compared(net, calls, losses(), 1500) < 1e-5


@pytest.mark.parametrize(
    "loss",
    [
        {"reduction": "trajectory_mean"},
        {"reduction": "sequence_mean"},
        {"reduction": "constant", "constant": 100.0},
        {"name": "gspo"},
        {"name": "cispo"},
        {"old_policy": "recomputed", "importance": {"level": "sequence"}},
        {"stale": {"kl": 0.5}},
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [30, 4096])
def test_every_loss_in_pieces_and_whole(loss: dict[str, Any], budget: int) -> None:
    net = small_model()
    calls = session(np.random.default_rng(6), 0, turns=3, strip=True) + session(np.random.default_rng(7), 1, turns=2, strip=False)
    assert compared(net, calls, losses(**loss), budget) < 1e-9


def test_the_check_sees_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    net = small_model()
    calls = session(np.random.default_rng(8), 0, turns=5, strip=True)
    one = trie(calls)
    assert compared(net, calls, losses(), 40) < 1e-9
    assert compared(net, calls, losses(), 4096, faulty=True, position=np.arange(len(one))) > 1e-3
    weight = one.weight.copy()
    weight[7] *= 1.01
    assert compared(net, calls, losses(), 40, faulty=True, weight=weight) > 1e-6
    with monkeypatch.context() as patched:
        grown = pieces.segments(one.sub_end, one.position)
        inner = int(np.flatnonzero((grown[:, 2] > grown[:, 1]) & (grown[:, 2] < len(one)))[0])
        grown[inner, 2] += 1
        patched.setattr(pieces, "segments", lambda *_: grown)
        assert compared(net, calls, losses(), 4096, faulty=True) > 1e-6
    with monkeypatch.context() as patched:
        patched.setattr(attention.Held, "returned", lambda self, layer, number, of: of)
        assert compared(net, calls, losses(), 40, faulty=True) > 1e-3


def test_gradient_checkpointing_changes_nothing() -> None:
    net = small_model()
    calls = session(np.random.default_rng(9), 0, turns=4, strip=True)
    net.gradient_checkpointing_enable({"use_reentrant": False})
    assert compared(net, calls, losses(), 40) < 1e-9


def test_in_bfloat16_it_is_as_near_as_call_by_call_is() -> None:
    """Both are compared with float32."""
    net = small_model(dtype=torch.float32)
    calls = session(np.random.default_rng(18), 0, turns=4, strip=True)
    one, config = trie(calls), losses()
    call_by_call(net, calls, config, one.total())
    exact = taken(net)
    with torch.autocast("cpu", torch.bfloat16):
        call_by_call(net, calls, config, one.total())
    rounded = taken(net)
    for budget in (40, 4096):
        by_tree(net, Tries(one, budget), config, one.total(), passes=Passes(CPU, 4096, autocast=True))
        assert distance(taken(net), exact) < 2 * distance(rounded, exact) < 0.1


def test_logits_in_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_ray.train_loop.tree.head.LOGITS_AT_ONCE", 1)
    monkeypatch.setattr("forge_ray.train_loop.tree.head.ROWS_AT_LEAST", 3)
    calls = random_calls(np.random.default_rng(10))
    assert compared(small_model(), calls, losses(), 4096) < 1e-9


def test_without_the_private_kernels_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.has_flash_kernels()
    monkeypatch.setattr(cpu, "has_flash_kernels", lambda: False)
    monkeypatch.setattr(cpu, "flash_attention", None)
    net = small_model()
    for budget in (40, 4096):
        assert compared(net, session(np.random.default_rng(11), 0, turns=4, strip=True), losses(), budget) < 1e-9


def test_flex_attention_has_the_same_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward needs a GPU."""
    net = small_model(dtype=torch.float32)
    part = Tries(trie(session(np.random.default_rng(12), 0, turns=3, strip=True)), 40)
    wanted = part.score(net, Passes(CPU, 4096))

    def flexible(query: Any, key: Any, value: Any, past: Any, own: Any, scale: float) -> Any:
        parts = [pieces.Past(0, 0, keys.shape[2], seen) for keys, _, seen in past]
        return flex.attention(query, key, value, past, flex.block_mask(parts, own, query.device), scale)

    monkeypatch.setattr(cpu, "attention", flexible)
    np.testing.assert_allclose(part.score(net, Passes(CPU, 4096)), wanted, atol=1e-5)


def test_scores_are_those_of_the_calls_under_their_temperatures() -> None:
    net = small_model()
    one = trie(random_calls(np.random.default_rng(13)))
    for budget in (10, 4096):
        got = Tries(one, budget).score(net, Passes(CPU, 4096))
        for index in range(0, one.emissions, 5):
            at = one.at[index]
            ids = one.ids[[j for j in range(at + 1) if at < one.sub_end[j]]]
            with torch.no_grad():
                logits = net(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, -1] / float(one.temperature[index])
            assert got[index] == pytest.approx(float(logits.log_softmax(-1)[one.token[index]]), abs=1e-9)


def test_parts_of_a_part() -> None:
    calls = random_calls(np.random.default_rng(14)) + session(np.random.default_rng(15), 3, turns=2, strip=False)
    part = Tries(trie(calls, rollouts="abcd"), 100).with_scores("reference_logprobs", np.arange(trie(calls).emissions, dtype=np.float32))
    some = part.sampled_by(1, 2)
    assert (some.steps == 1).any() and len(np.unique(some.forest.sequence)) <= 2
    np.testing.assert_array_equal(part.old_logprobs[some.scores["reference_logprobs"].astype(int)], some.old_logprobs)
    assert part.sampled_by(17, 4).forest.emissions == 0
    assert sum(one.total().tokens for one in part.minibatches(2, "x")) == part.total().tokens


def test_models_that_would_not_be_exact_are_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

    model.check(small_model("qwen3"))
    model.check(small_model("llama"))
    size: dict[str, Any] = {
        "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 16,
    }  # fmt: skip
    sliding = Qwen3ForCausalLM(Qwen3Config(**size, use_sliding_window=True, sliding_window=4, max_window_layers=1))
    dropping = small_model()
    dropping.config.attention_dropout = 0.1
    for net, what in (
        (sliding, "sliding_attention"),
        (Gemma2ForCausalLM(Gemma2Config(**size)), "sliding_attention"),
        (GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2)), "dropout"),
        (dropping, "attention_dropout"),
        (torch.nn.Linear(2, 2), "no causal language model"),
    ):
        with pytest.raises(UserError, match=what):
            model.check(net.train())
    scaled = small_model()
    plain = scaled.forward
    scaled.forward = lambda **given: _scaled(plain(**given))
    with pytest.raises(UserError, match="changes its logits"):
        model.check(scaled)


def _scaled(output: Any) -> Any:
    output.logits = output.logits * 0.5
    return output


def test_mixtures_of_experts_are_exact_without_a_balance_loss_and_refused_with_one() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, max_position_embeddings=512,
    )  # fmt: skip
    net = Qwen3MoeForCausalLM(shape).train()
    model.check(net)
    assert compared(net, session(np.random.default_rng(16), 0, turns=3, strip=True), losses(), 40) < 1e-5
    net.config.output_router_logits = True
    with pytest.raises(UserError, match="balance loss"):
        model.check(net)
