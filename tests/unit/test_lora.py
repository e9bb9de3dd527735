"""Adapters: only they are trained, published and saved; the base without them is the reference; merged they are the same policy."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forge_ray.config import Lora
from forge_ray.errors import UserError
from forge_ray.job import single
from forge_ray.serve_proxy import weights
from forge_ray.train_loop import attention, checkpoint, lora, preflight
from forge_ray.train_loop.export import export
from forge_ray.train_loop.learner import Learner
from forge_ray.train_loop.part import Passes
from forge_ray.train_loop.rows import Rows
from forge_ray.train_loop.strategies import Strategy
from tests.unit import learning

PLAIN = Passes(learning.CPU, 10_000)


@pytest.fixture
def trained(tmp_path: Path) -> Learner:
    """Two steps away from its base, saved."""
    settings = learning.config(lora={"rank": 4, "alpha": 16}, loss={"kl": 0.05}, optimizer={"lr": 2e-2, "epochs": 2})
    learner = learning.learner_of(settings, learning.with_model(tmp_path))
    for _ in range(2):
        metrics = learner.train(learning.sampled(learner, learning.rollouts(learner.step)))
        assert metrics["logprob_diff"] < 1e-6
    assert metrics["kl"] > 1e-4
    learner.save(None)
    return learner


def score(model: torch.nn.Module, passes: Passes = PLAIN) -> np.ndarray:
    return Rows(learning.rollouts(7)).score(model, passes)


def test_the_base_stays_and_is_the_reference(trained: Learner) -> None:
    model = trained.strategy.model
    adapted = score(model, trained.passes)
    with lora.without(model):
        base = score(model, trained.passes)
    np.testing.assert_allclose(base, score(learning.small_model()), atol=1e-6)
    assert np.abs(adapted - base).max() > 1e-2, "the adapters do something"
    assert np.array_equal(score(model, trained.passes), adapted), "and they are on again"
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in model.named_parameters())


def test_only_adapters_are_published_and_the_replicas_merge_is_the_same_policy(trained: Learner) -> None:
    _, path = trained.publish()
    assert path is not None
    tensors = load_file(path)
    names = {name.rpartition(".")[2] for name in tensors}
    assert names == {"lora_A", "lora_B"}
    full = sum(parameter.numel() for parameter in learning.small_model().parameters())
    assert sum(tensor.numel() for tensor in tensors.values()) < full / 2
    model, initial = learning.small_model(), str(trained.run.root.parent / "model")
    files = weights.files(str(path), trained.run, initial)
    weights.check(files, weights.checkpoint(initial), tied=True)
    model.load_state_dict(dict(weights.tensors(files)), strict=False)
    np.testing.assert_allclose(score(model), score(trained.strategy.model, trained.passes), atol=1e-5)


def test_a_supervised_start_is_the_base_of_the_adapters(tmp_path: Path) -> None:
    settings = learning.config(lora={"rank": 4}, sft={"demonstrations": "d"}, optimizer={"lr": 1e-2})

    def supervise(strategy: Strategy, passes: Passes) -> None:
        with torch.no_grad():
            for parameter in strategy.own():
                parameter.mul_(1.1)

    learner = learning.learner_of(settings, learning.with_model(tmp_path), supervise=supervise)
    learner.train(learning.sampled(learner, learning.rollouts(0)))
    _, path = learner.publish()
    model = learning.small_model()
    model.load_state_dict(dict(weights.tensors(weights.files(str(path), learner.run, str(tmp_path / "model")))), strict=False)
    np.testing.assert_allclose(score(model), score(learner.strategy.model, learner.passes), atol=1e-5)
    assert np.abs(score(model) - score(learning.small_model())).max() > 1e-2


def test_a_checkpoint_of_adapters_is_exported_merged_or_in_pefts_form(trained: Learner, tmp_path: Path) -> None:
    import peft

    wanted = score(trained.strategy.model, trained.passes)
    directory = checkpoint.path(trained.run, 2)
    assert checkpoint.problem(directory) is None and not (directory / "model.safetensors").exists()
    merged = export(trained.run, 2, tmp_path / "merged")
    np.testing.assert_allclose(score(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=1e-5)
    alone = export(trained.run, 2, tmp_path / "adapter", adapter=True)
    base = json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(alone))
    np.testing.assert_allclose(score(again.get_base_model()), wanted, atol=1e-5)
    served = single._with_adapters_merged(directory)
    assert served == trained.run.root / "merged" / "step-000002" and single._with_adapters_merged(served) == served
    for file in merged, alone:
        assert not {"trainer.json", "optimizer.pt", "rng.pt"} & {entry.name for entry in file.iterdir()}
    with pytest.raises(UserError, match="exists"):
        export(trained.run, 2, merged)
    with pytest.raises(UserError, match="/proc/no/model cannot be made"):
        export(trained.run, 2, Path("/proc/no/model"))
    with pytest.raises(UserError, match="there are: 0, 2"):
        export(trained.run, 1, tmp_path / "other")
    with pytest.raises(UserError, match="no adapters"):
        export(trained.run, 0, tmp_path / "other", adapter=True)


def test_a_damaged_checkpoint_of_adapters_is_left_out(trained: Learner) -> None:
    file = checkpoint.path(trained.run, 2) / "adapter_model.safetensors"
    whole = file.read_bytes()
    for bad in (whole[: len(whole) // 2], b""):
        file.write_bytes(bad)
        assert checkpoint.newest(trained.run)[0] == 0
    file.unlink()
    assert checkpoint.newest(trained.run)[0] == 0


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["no_such_proj"], "no_such_proj"),
        (["q_proj", "v_prj"], r"no layer of the model is called 'v_prj'; write all-linear, or some of .*\bv_proj\b"),
        (["q_proj", "embed_tokens"], "embed_tokens is no linear layer"),
        (["q_proj", "all-linear"], "'all-linear'"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused_by_name_before_a_run_begins(targets: list[str], problem: str, tmp_path: Path) -> None:
    settings = learning.config(lora={"targets": targets})
    folder = learning.with_model(tmp_path)
    with pytest.raises(UserError, match=rf"train\.lora\.targets: .*{problem}"):
        preflight.refuse(folder / "model", settings.train)
    with pytest.raises(UserError, match=problem):
        learning.learner_of(settings, folder)
    preflight.refuse(folder / "model", learning.config(lora={"targets": ["q_proj", "mlp.up_proj"]}, builder="tree").train)


def test_a_head_that_is_the_embeddings_too_gets_no_adapter() -> None:
    model = learning.small_model()
    model.config.tie_word_embeddings = True
    with pytest.raises(UserError, match=r"lm_head shares its weight with the embeddings"):
        lora.attach(model, Lora(targets=["lm_head"]))


def test_packing_and_adapters_go_together(trained: Learner) -> None:
    adapted: Any = trained.strategy.model  # peft's, which has whatever its base has
    assert trained.passes.packed and adapted.config._attn_implementation == attention.NAME
    plain = copy.deepcopy(adapted)
    plain.set_attn_implementation("sdpa")
    np.testing.assert_allclose(score(plain), score(adapted, trained.passes), atol=1e-5)
