"""Rows, micro-batches and log-probabilities, on small real models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.spawn import start_processes
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from forge_ray.config import Advantage, Credit, Loss, Train
from forge_ray.train_loop import forward
from forge_ray.train_loop.forward import Row
from forge_ray.train_loop.losses import NotFinite, Total, policy_loss, sft_loss
from forge_ray.train_loop.part import Passes
from forge_ray.train_loop.rows import Rows
from forge_ray.trajectories import batch
from forge_ray.trajectories.schema import SCHEMA
from tests.unit.making import make_call, make_record, make_rollout

END = 2
"""End token and pad token at once, as SmolLM2-Instruct ships."""


def small(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": END,
        "eos_token_id": END,
        "bos_token_id": 1,
        "initializer_range": 0.2,
        **changes,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    if kind == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**sizes, final_logit_softcapping=2.0, query_pre_attn_scalar=8)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).eval()


def head_of(model: PreTrainedModel) -> torch.nn.Module:
    head = model.get_output_embeddings()
    assert head is not None
    return head


def row(name: str, ids: list[int], positions: list[int], **changes: Any) -> Row:
    count = len(positions)
    fields: dict[str, Any] = {
        "old_logprobs": np.full(count, -1.0, np.float32),
        "advantages": np.ones(count, np.float32),
        "weights": np.ones(count, np.float32),
        "temperature": np.ones(count, np.float32),
        "steps": np.zeros(count, np.int64),
        "trajectory_tokens": count,
        **changes,
    }
    return Row(name, np.array(ids, np.int64), np.array(positions, np.int64), **fields)


def alone(model: PreTrainedModel, one: Row) -> torch.Tensor:
    """The row's trained log-probabilities the plain way: no padding, no mask, logits everywhere."""
    logits = model(torch.tensor(one.ids)[None]).logits[0].float()
    at = torch.tensor(one.positions)
    return (
        (logits[at - 1] / torch.tensor(one.temperature)[:, None])
        .log_softmax(-1)
        .gather(1, torch.tensor(one.ids[one.positions])[:, None])[:, 0]
    )


# Lengths 5 and 9; the end token (= pad) twice in each prompt and once sampled, at the very end.
SHORT = row("s", [END, 7, END, 9, END], [3, 4], temperature=np.array([0.7, 0.7], np.float32))
LONG = row("l", [5, END, 6, END, 11, 12, 13, 14, END], [4, 6, 8])


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
def test_padded_rows_have_the_logprobs_of_each_row_alone(kind: str) -> None:
    model = small(kind)
    made, _ = forward.token_logprobs(model, forward.collate([SHORT, LONG]))
    expected = torch.cat([alone(model, SHORT), alone(model, LONG)])
    assert made.shape == (5,) and made.dtype == torch.float32
    assert torch.allclose(made, expected, atol=1e-5)


def test_the_end_token_is_trained_and_attended_to_although_it_is_the_pad_token() -> None:
    model = small("llama")
    made, _ = forward.token_logprobs(model, forward.collate([SHORT, LONG]))
    changed = row("l", [5, 8, 6, 8, 11, 12, 13, 14, END], [4, 6, 8])
    other, _ = forward.token_logprobs(model, forward.collate([SHORT, changed]))
    assert forward.collate([SHORT, LONG]).targets.tolist() == [9, END, 11, 13, END]
    assert not torch.allclose(made[2:], other[2:], atol=1e-3), "the end tokens of the prompt are seen"
    sft_loss(made, total=Total(5, 2))[0].backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)


def test_gradients_are_those_of_the_rows_alone() -> None:
    model = small("qwen3")
    forward.token_logprobs(model, forward.collate([SHORT, LONG]))[0].sum().backward()
    made = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    torch.cat([alone(model, SHORT), alone(model, LONG)]).sum().backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(made) == len(expected) > 10
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(made, expected, strict=True))


def test_padding_lets_no_nan_through() -> None:
    model = small("qwen3")
    embedding, head = model.get_input_embeddings(), head_of(model)
    assert isinstance(embedding, torch.nn.Embedding)
    head.weight = torch.nn.Parameter(torch.randn(32, 32))
    with torch.no_grad():
        embedding.weight[[0, 30]] = math.nan
    made, _ = forward.token_logprobs(model, forward.collate([SHORT, LONG]))
    assert torch.allclose(made, torch.cat([alone(model, SHORT), alone(model, LONG)]), atol=1e-5)


def test_only_needed_positions_have_logits() -> None:
    model = small("qwen3")
    shapes = []
    hook = head_of(model).register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    forward.token_logprobs(model, forward.collate([SHORT, LONG]))
    hook.remove()
    assert shapes == [(1, 5, 32)]
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 32), "the model is left as it was"


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_temperature_and_entropy_are_of_the_distribution_that_was_sampled(kind: str) -> None:
    model = small(kind)
    made, entropy = forward.token_logprobs(model, forward.collate([SHORT, LONG]), entropy=True)
    logits = model(torch.tensor(SHORT.ids)[None]).logits[0].float()
    expected = torch.distributions.Categorical(logits=logits[2:4] / 0.7)
    assert entropy is not None and torch.allclose(entropy[:2], expected.entropy(), atol=1e-4)
    assert torch.allclose(made[:2], expected.log_prob(torch.tensor([9, END])), atol=1e-5)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(forward.RowError, match="output head"):
        forward.token_logprobs(torch.nn.Linear(2, 2), forward.collate([SHORT]))


# --- rows ----------------------------------------------------------------------------------------------------------------------------


def test_rows_hold_the_tokens_in_the_loss_and_nothing_else() -> None:
    calls = [
        make_call(
            [1], [2, 3], order=0, session="a.0", logprobs=[-0.5, -0.25], spans=[("0.4", 0, 1), ("0.5", 1, 2)], sampling={"temperature": 0.7}
        ),
        make_call([1, 2, 3, 4], [5], order=1, session="a.0"),
        make_call([8], [9], order=2, session="a.0", kind="subagent"),
        make_call([7], [7], order=3, session="a.0", kind="aux"),
    ]
    idle = [make_rollout(f"c{n}.0", 1, group=1) for n in range(2)]
    step = batch.build_step(
        [[(make_record("a.0", 1), calls), make_rollout("b.0", 0)], idle],
        Train(advantage=Advantage(name="dr_grpo"), credit=Credit(kind_weights={"subagent": 0.5})),
    )
    first, second, other = forward.rows(step.table)
    assert first.ids.tolist() == [1, 2, 3, 4, 5] and first.positions.tolist() == [1, 2, 4]
    assert first.old_logprobs.tolist() == [-0.5, -0.25, -2.0] and first.steps.tolist() == [4, 5, 3]
    assert first.temperature.tolist() == pytest.approx([0.7, 0.7, 1]) and first.advantages.tolist() == [0.5] * 3
    assert second.weights.tolist() == [0.5]
    assert (first.name, second.name, other.name) == ("a.0", "a.0", "b.0")
    assert [made.trajectory_tokens for made in (first, second, other)] == [4, 4, 3], "over all samples of the trajectory"
    assert forward.total([first, second, other]) == Total(7, 2, 4)
    assert step.stats["tokens_trained"] == 7
    assert forward.rows(step.table.slice(0, 0)) == []


def test_rows_of_a_sliced_or_chunked_table_are_the_same() -> None:
    table = batch.build_step([[make_rollout(f"{n}.0", n % 2, samples=2) for n in range(4)]], Train()).table
    chunked = pa.concat_tables([table.slice(0, 3), table.slice(3)])
    plain = forward.rows(table)
    for made in (forward.rows(chunked), forward.rows(table.slice(0, 4)) + forward.rows(table.slice(4))):
        assert [(r.name, r.ids.tolist(), r.positions.tolist(), r.advantages.tolist()) for r in made] == [
            (r.name, r.ids.tolist(), r.positions.tolist(), r.advantages.tolist()) for r in plain
        ]


def test_a_table_that_weighs_a_token_nobody_sampled_is_refused() -> None:
    table = batch.build_step([[make_rollout("a.0", 1), make_rollout("b.0", 0)]], Train()).table
    rows = table.to_pylist()
    rows[0]["weight"][0] = 1.0
    with pytest.raises(forward.RowError, match=r"a\.0.*not sampled"):
        forward.rows(pa.Table.from_pylist(rows, SCHEMA))
    rows[0]["mask"][0] = True
    with pytest.raises(forward.RowError, match="first token"):
        forward.rows(pa.Table.from_pylist(rows, SCHEMA))


def test_demonstrations(tmp_path: Path) -> None:
    table = pa.table({"ids": [[1, 2, 3], [4, 5], [6, 7]], "mask": [[False, True, True], [False, False], [False, True]]})
    made = forward.demonstration_rows(table)
    assert [(r.name, r.ids.tolist(), r.positions.tolist()) for r in made] == [("0", [1, 2, 3], [1, 2]), ("2", [6, 7], [1])]
    with pytest.raises(forward.RowError, match="demonstration 0: 2 ids and 1"):
        forward.demonstration_rows(pa.table({"ids": [[1, 2]], "mask": [[True]]}))
    with pytest.raises(forward.RowError, match="first token"):
        forward.demonstration_rows(pa.table({"ids": [[1, 2]], "mask": [[True, True]]}))


# --- micro-batches, mini-batches -----------------------------------------------------------------------------------------------------


def microbatches(rows: list[Row], bound: int) -> list[forward.Microbatch]:
    """As the learner cuts them."""
    return [batch for _, batch in Rows(rows)._batches(Passes(torch.device("cpu"), bound))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 40), max_size=20), st.integers(1, 100))
def test_micro_batches_hold_every_row_once_within_the_bound(lengths: list[int], bound: int) -> None:
    made = microbatches([row(f"r{n}", [1] * length, [1]) for n, length in enumerate(lengths)], bound)
    assert sorted(name for part in made for name in part.names) == sorted(f"r{n}" for n in range(len(lengths)))
    assert all(part.input_ids.numel() <= bound or len(part.names) == 1 for part in made if part.names)
    masks = [(part.attention_mask, part.names) for part in made if part.attention_mask is not None]
    assert len(masks) == len(made)
    assert all(mask.sum(1).tolist() == [lengths[int(name[1:])] for name in names] for mask, names in masks if names)
    assert len(made) >= 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(2, 30)), max_size=20), st.integers(1, 4), st.integers(0, 5))
def test_mini_batches_hold_every_row_once_and_trajectories_whole(spec: list[tuple[str, int]], parts: int, seed: int) -> None:
    given_rows = [row(name, [1] * length, [1]) for name, length in spec]
    made = forward.minibatches(given_rows, parts, seed)
    assert len(made) == parts
    assert sorted(id(r) for part in made for r in part) == sorted(map(id, given_rows))
    owners = [{r.name for r in part} for part in made]
    assert sum(map(len, owners)) == len({name for name, _ in spec})
    assert [[id(r) for r in part] for part in made] == [[id(r) for r in part] for part in forward.minibatches(given_rows, parts, seed)]


def step_loss(model: torch.nn.Module, rows: list[Row], bound: int, total: Total, config: Loss) -> float:
    value = 0.0
    for part in microbatches(rows, bound):
        logprobs, entropy = forward.token_logprobs(model, part, entropy=True)
        loss, _ = policy_loss(config, part.loss_inputs(logprobs, entropy=entropy), total)
        loss.backward()
        value += loss.item()
    return value


@pytest.mark.parametrize("reduction", ["token_mean", "trajectory_mean", "constant"])
def test_micro_batches_and_empty_shares_change_neither_loss_nor_gradient(reduction: Any) -> None:
    config = Loss(entropy=0.01, reduction=reduction, constant=9.0)
    given_rows = [
        row(f"t{n % 3}", list(range(1, 5 + n)), [2, 3], advantages=np.array([n, -1], np.float32), trajectory_tokens=4) for n in range(6)
    ]
    total = forward.total(given_rows)
    results = []
    for shares, bound in (([given_rows], 10_000), ([given_rows], 12), ([given_rows[:1], given_rows[1:], []], 16)):
        model = small("qwen3")
        value = sum(step_loss(model, share, bound, total, config) for share in shares)
        results.append((value, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    for value, gradient in results[1:]:
        assert value == pytest.approx(results[0][0], abs=1e-5)
        assert torch.allclose(gradient, results[0][1], atol=1e-5)
    assert results[0][1].abs().max() > 1e-3


def test_a_share_without_rows_reaches_every_weight_with_a_zero_gradient() -> None:
    model = small("qwen3")
    (part,) = microbatches([], 100)
    logprobs, _ = forward.token_logprobs(model, part)
    policy_loss(Loss(), part.loss_inputs(logprobs), Total(14, 2))[0].backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_nan_is_reported_with_its_rollout_and_token() -> None:
    bad = row("g00007-3.1", [1, 2, 3, 4], [1, 3], old_logprobs=np.array([-1, np.nan], np.float32))
    part = forward.collate([SHORT, bad])
    logprobs, _ = forward.token_logprobs(small("qwen3"), part)
    with pytest.raises(NotFinite, match=r"old_logprobs.*g00007-3\.1, token 3"):
        policy_loss(Loss(), part.loss_inputs(logprobs), Total(4, 2))


# --- two real ranks ------------------------------------------------------------------------------------------------------------------


def _rank(rank: int, splits: list[list[list[Row]]], total: Total, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results = []
    for shares in splits:
        model = small("qwen3")
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        value = 0.0
        for part in microbatches(shares[rank], 10_000):
            logprobs, _ = forward.token_logprobs(parallel, part)
            loss, _ = policy_loss(Loss(), part.loss_inputs(logprobs), total)
            (loss * 2).backward()  # DDP averages over the two
            value += loss.item()
        summed = torch.tensor([value])
        torch.distributed.all_reduce(summed)
        results.append((summed.item(), [parameter.grad for parameter in model.parameters()]))
    if rank == 0:
        torch.save(results, f"{folder}/results")
    torch.distributed.destroy_process_group()


def test_two_ddp_ranks_are_one_batch_also_where_one_has_nothing(tmp_path: Path) -> None:
    four = row("a", list(range(1, 8)), [3, 4, 5, 6], advantages=np.full(4, -1, np.float32))
    ten = row("b", list(range(1, 16)), list(range(5, 15)), advantages=np.full(10, -3, np.float32))
    for one in (four, ten):  # on policy: every ratio is 1, the loss of a token is its negative advantage
        one.old_logprobs = alone(small("qwen3"), one).detach().numpy()
    total = forward.total([four, ten])
    splits = [[[four], [ten]], [[four, ten], []]]
    # Not forked: a child would hold the locks of threads that it does not have, and now and then wait for them for ever.
    start_processes(_rank, args=(splits, total, str(tmp_path)), nprocs=2, start_method="spawn")
    model = small("qwen3")
    assert step_loss(model, [four, ten], 10_000, total, Loss()) == pytest.approx(34 / 14, abs=1e-5)
    expected = [parameter.grad for parameter in model.parameters()]
    results = torch.load(tmp_path / "results")
    assert len(results) == 2
    for value, gradients in results:
        assert value == pytest.approx(34 / 14, abs=1e-5)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, expected, strict=True) if b is not None)
