"""A teacher in the learner: its numbers are computed once per batch, and the policy moves towards it. Real torch, no Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.model_files import vocabulary_problem
from forge_ray.run_dir import RunDir
from forge_ray.train_loop import forward
from forge_ray.train_loop.forward import Row
from forge_ray.train_loop.learner import Learner
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.rows import Rows
from tests.unit.test_learner import CPU, VOCABULARY, batch, config, small_model, step_of, strategy_of

PROMPT, SAMPLED = 3, 8


@torch.no_grad()
def sample(model: torch.nn.Module, count: int, step: int) -> list[Row]:
    """Rollouts of the policy at temperature 1, with rewards that say nothing."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (count, PROMPT), generator=draw)
    logprobs = []
    for _ in range(SAMPLED):
        scores = model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=draw)
        logprobs.append(scores.gather(1, chosen)[:, 0])
        ids = torch.cat([ids, chosen], dim=1)
    one, positions = np.ones(SAMPLED, np.float32), np.arange(PROMPT, PROMPT + SAMPLED)
    return [
        Row(f"r{step}-{n}", row.numpy(), positions, old.numpy(), 0 * one, one, one, np.full(SAMPLED, step), SAMPLED)
        for n, (row, old) in enumerate(zip(ids, torch.stack(logprobs, dim=1), strict=True))
    ]


def opinionated() -> torch.nn.Module:
    """A model that says hardly anything but ten of the tokens."""
    model = small_model(seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(0)
    for _ in range(40):
        ids = torch.randint(1, 11, (32, PROMPT + SAMPLED), generator=draw)
        ids[:, :PROMPT] = torch.randint(1, VOCABULARY, (32, PROMPT), generator=draw)
        scores = model(input_ids=ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        optimizer.zero_grad()
        (-scores.gather(2, ids[:, PROMPT:, None]).mean()).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def divergence(policy: torch.nn.Module, teacher: torch.nn.Module) -> float:
    """KL(policy || teacher) over whole distributions, nats per token, on fresh rollouts of the policy."""
    ids = torch.stack([torch.from_numpy(row.ids) for row in sample(policy, 64, 10_000)])
    own, other = (model(input_ids=ids).logits[:, PROMPT - 1 : -1].float().log_softmax(-1) for model in (policy, teacher))
    return float((own.exp() * (own - other)).sum(-1).mean())


@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_the_policy_moves_towards_the_teacher(tmp_path: Path, form: str) -> None:
    teacher: Any = opinionated()
    teacher.save_pretrained(tmp_path / "teacher")
    small_model().save_pretrained(tmp_path / "policy")
    settings = config(
        steps=16,
        optimizer={"lr": 1e-2, "epochs": 1},
        loss={"name": "distillation", "distillation": {"teacher": str(tmp_path / "teacher"), "form": form}},
    )
    run = RunDir(tmp_path / "run").create()
    learner = Learner(
        settings, run, tmp_path / "policy", ranks=Ranks(), device=CPU, incarnation=1, teacher=tmp_path / "teacher"
    )  # fmt: skip
    policy = learner.strategy.module
    before, told = divergence(policy, teacher), []
    for step in range(16):
        rows = sample(policy, 48, step)
        metrics = learner.train(Rows(rows))
        told.append(metrics["teacher_kl"])
        if step == 0:
            ids = torch.stack([torch.from_numpy(row.ids) for row in rows])
            with torch.no_grad():
                scores = teacher(input_ids=ids).logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
            theirs = scores.gather(2, ids[:, PROMPT:, None])[..., 0]
            ours = torch.stack([torch.from_numpy(row.old_logprobs) for row in rows])
            assert told[0] == pytest.approx(float((ours - theirs).mean()), abs=1e-4), "the reverse KL on the sampled tokens"
    after = divergence(policy, teacher)
    assert before > 0.5 and after < before / 2 and told[-1] < told[0] / 2, (before, after, told)


def test_a_teacher_of_another_architecture_rates_as_it_was_built_to(tmp_path: Path) -> None:
    """It sees six tokens at a time, which rows of the packed policy do not know of, and tries cannot."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(5)
    teacher = MistralForCausalLM(MistralConfig(**sizes, sliding_window=6)).eval()
    teacher.save_pretrained(tmp_path / "teacher")
    small_model().save_pretrained(tmp_path / "policy")
    loss = {"name": "distillation", "distillation": {"teacher": str(tmp_path / "teacher")}}

    def learner(folder: Path, **train: Any) -> Learner:
        run, settings = RunDir(folder).create(), config(loss=loss, **train)
        return Learner(settings, run, tmp_path / "policy", ranks=Ranks(), device=CPU, incarnation=1, teacher=tmp_path / "teacher")

    made = learner(tmp_path / "run")
    assert made.passes.packed
    rows = sample(made.strategy.module, 3, 0)
    got = made._others["teacher_logprobs"](Rows(rows)).reshape(3, SAMPLED)
    for row, scores in zip(rows, got, strict=True):
        for place, score in zip(row.positions.tolist(), scores.tolist(), strict=True):
            with torch.no_grad():
                logits = teacher(input_ids=torch.from_numpy(row.ids[None, :place])).logits[0, -1]
            assert score == pytest.approx(float(logits.log_softmax(-1)[row.ids[place]]), abs=1e-4)
    with pytest.raises(UserError, match="MistralForCausalLM has layers of kind sliding_attention"):
        learner(tmp_path / "tree", builder="tree")


def test_other_policies_are_asked_once_per_batch_whatever_the_number_of_updates() -> None:
    model, asked = small_model(), []

    def scorer(part: Any) -> np.ndarray:
        asked.append(part.total().tokens)
        return np.concatenate([row.old_logprobs for row in part.rows]) - 0.25

    settings = config(
        optimizer={"lr": 1e-4, "epochs": 2, "minibatches": 2},
        loss={"kl": 0.1, "kl_kind": "k2", "old_policy": "recomputed", "importance": {"level": "token"}},
    )
    rows = batch(model, 0)
    metrics = step_of(strategy_of(model, settings), rows, settings, 0, others={"reference_logprobs": scorer})
    assert asked == [30] and metrics["updates"] == 4
    assert metrics["kl"] == pytest.approx(0.25**2 / 2, rel=0.2)
    # The trainer's own numbers are the engine's here, and what weighs a token is of before the first update: 1 throughout.
    assert metrics["proximal_kl"] < 1e-9 and metrics["importance"] == pytest.approx(1, abs=1e-4)
    assert metrics["importance_max"] == pytest.approx(1, abs=1e-3) and metrics["importance_capped"] == 0


def _model_directory(folder: Path, vocabulary: Any, size: int) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"content": "<end>", "id": 2}]}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    return folder


def test_a_teacher_with_other_tokens_is_refused_by_the_token(tmp_path: Path) -> None:
    own = _model_directory(tmp_path / "own", {"a": 0, "b": 1}, 4)
    assert vocabulary_problem(own, _model_directory(tmp_path / "larger", {"a": 0, "b": 1, "c": 3}, 9)) is None
    assert vocabulary_problem(own, _model_directory(tmp_path / "unigram", [["a", -1.0], ["b", -2.0]], 3)) is None
    assert "'b' is not number 1" in str(vocabulary_problem(own, _model_directory(tmp_path / "other", {"a": 0, "b": 3}, 4)))
    assert "vocabulary of 2" in str(vocabulary_problem(own, _model_directory(tmp_path / "small", {"a": 0, "b": 1}, 2)))
    assert "tokenizer.json" in str(vocabulary_problem(own, tmp_path))


def test_a_group_whose_rewards_say_nothing_is_trained_where_a_teacher_rates_it() -> None:
    from forge_ray.trajectories.batch import build_step
    from tests.unit.making import make_rollout

    group = [[make_rollout("a.0", 1), make_rollout("b.0", 1)]]
    plain = Config.model_validate(config().model_dump()).train
    taught = config(loss={"name": "distillation", "distillation": {"teacher": "t"}}).train
    assert build_step(group, plain).stats["rollouts_trained"] == 0
    stats = build_step(group, taught)
    assert stats.stats["rollouts_trained"] == 2 and stats.stats["groups_degenerate"] == 0
    assert all(not row.advantages.any() for row in forward.rows(stats.table))


def test_the_check_looks_for_the_teacher_and_for_the_packages_of_sinks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_ray.cli.main import main
    from forge_ray.report import sinks

    monkeypatch.setitem(sinks.PACKAGES, "wandb", "no_such_module")
    quickstart = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "run.yaml"
    loss = f"train.loss={{name: distillation, distillation: {{teacher: {tmp_path}/none}}}}"
    assert main(["check", str(quickstart), "--quick", f"runs={tmp_path}", loss, "metrics.wandb={}"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("MISS  train.loss.distillation.teacher") and "none does not exist" in line for line in lines)
    assert any(line.startswith("MISS  metrics.wandb") and "EXTRAS=cpu,wandb" in line for line in lines)
