"""What becomes of a step that cannot be trained as it is: nothing to learn, gradients that explode, NaN from the policy or the record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from forge_ray.config import Config
from forge_ray.job import retention
from forge_ray.report import signal
from forge_ray.report.metrics import MetricsWriter, StepMetrics
from forge_ray.run_dir import RunDir
from forge_ray.train_loop import checkpoint
from forge_ray.train_loop.learner import Learner
from forge_ray.train_loop.losses import NotFinite
from forge_ray.train_loop.room import DiskFull
from forge_ray.train_loop.rows import Rows
from forge_ray.train_loop.strategies.ddp import Replicated
from forge_ray.train_loop.strategies.deepspeed import Sharded
from forge_ray.train_loop.update import Diverged
from tests.small_disk import small_disk
from tests.unit import learning
from tests.unit.making import make_record


def made(folder: Path, zero: int = 0, **optimizer: float) -> Learner:
    if zero:
        pytest.importorskip("deepspeed")
    own = {"strategy": "deepspeed", "deepspeed": {"zero": zero}} if zero else {}
    settings = learning.config(steps=20, loss={"kl": 0.01}, optimizer={"lr": 1e-3, **optimizer}, **own)
    return learning.learner_of(settings, learning.with_model(folder))


def state(learner: Learner) -> list[torch.Tensor]:
    """Weights and moments, copied."""
    assert isinstance(learner.strategy, Replicated | Sharded)
    moments = [value.clone() for entry in learner.strategy.optimizer.state.values() for value in entry.values()]
    assert moments or not learner.step
    return [value.clone() for value in learner.strategy.own()] + moments


def unchanged(before: list[torch.Tensor], learner: Learner) -> bool:
    after = state(learner)
    return len(before) == len(after) and all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def batch(learner: Learner) -> Rows:
    return learning.sampled(learner, learning.rollouts(learner.step))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_step_of_degenerate_groups_makes_no_update_and_the_version_moves_on(tmp_path: Path, zero: int) -> None:
    learner = made(tmp_path, zero)
    learner.train(batch(learner))
    before = state(learner)
    metrics = learner.train(Rows([]))
    assert learner.step == 2 and metrics["updates"] == 0 and metrics.get("loss") is None and metrics["checked_tokens"] == 0
    assert unchanged(before, learner), "not even weight decay or old moments move a weight"
    assert learner.publish()[0] == "1.2", "rollouts go on under a new version of the same weights"
    assert learner.train(batch(learner))["updates"] == 1


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_update_whose_gradient_explodes_is_left_out_and_the_next_one_is_made(tmp_path: Path, zero: int) -> None:
    learner = made(tmp_path, zero, skip_grad_norm=50.0)
    first = learner.train(batch(learner))
    assert first["updates"] == 1 and first["grad_norm"] < 50
    before, wild = state(learner), batch(learner)
    for row in wild.rows:
        row.advantages = row.advantages * 1e4
    metrics = learner.train(wild)
    assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1) and "grad_norm" not in metrics
    assert unchanged(before, learner)
    assert signal.left_out(StepMetrics(step=2, **metrics)) is not None
    again = learner.train(batch(learner))
    assert (again["updates"], again["updates_skipped"]) == (1, 0) and not unchanged(before, learner)


@pytest.mark.parametrize("zero", [0, 3])
def test_nan_from_the_policy_leaves_updates_out_until_there_are_too_many(tmp_path: Path, zero: int) -> None:
    """Its weights are sound: the kernel, or the precision, gives NaN for one token."""
    if zero:
        pytest.importorskip("deepspeed")
    settings = learning.config(
        steps=20, optimizer={"lr": 1e-3, "max_skips": 2}, loss={"old_policy": "recomputed" if zero else "rollout"},
        **({"strategy": "deepspeed", "deepspeed": {"zero": zero}} if zero else {}),
    )  # fmt: skip
    learner = learning.learner_of(settings, learning.with_model(tmp_path))
    learner.train(batch(learner))
    before = {name: value.clone() for name, value in learner.strategy.tensors()}
    poison = False

    def spoil(module: torch.nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        if poison:
            output = output.clone()
            output[..., 0, :] = float("nan")
        return output

    assert isinstance(learner.strategy.model, PreTrainedModel)
    head = learner.strategy.model.get_output_embeddings()
    assert head is not None
    head.register_forward_hook(spoil)
    for _ in range(2):
        good = batch(learner)
        poison = True
        metrics = learner.train(good)
        poison = False
        assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1)
        assert all(torch.equal(before[name], value) for name, value in learner.strategy.tensors())
    assert learner.train(batch(learner))["updates"] == 1, "the count begins anew"
    with pytest.raises(Diverged, match=r"3 updates in a row.*max_skips = 2"):
        for _ in range(3):
            good = batch(learner)
            poison = True
            learner.train(good)
            poison = False


def test_nan_in_the_record_stops_at_once_by_name(tmp_path: Path) -> None:
    learner = made(tmp_path)
    learner.train(batch(learner))
    before, bad = state(learner), batch(learner)
    bad.rows[1].advantages = np.full_like(bad.rows[1].advantages, np.nan)
    with pytest.raises(NotFinite, match=r"advantages.*r1-1, token"):
        learner.train(bad)
    for value in (np.nan, -np.inf):
        bad = batch(learner)
        bad.rows[1].old_logprobs = np.full_like(bad.rows[1].old_logprobs, value)
        with pytest.raises(NotFinite, match=r"old_logprobs.*r1-1, token"):
            learner.train(bad)
    assert unchanged(before, learner)


def test_dropout_is_off_in_training_as_it_is_in_the_engine(tmp_path: Path) -> None:
    shape = GPT2Config(vocab_size=learning.VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    assert shape.resid_pdrop == shape.embd_pdrop == shape.attn_pdrop == 0.1
    model = GPT2LMHeadModel(shape).eval()
    model.save_pretrained(tmp_path / "model")
    learner = learning.learner_of(learning.config(optimizer={"lr": 1e-3}, gradient_checkpointing=True), tmp_path)
    rows = learning.rollouts(0)
    for row in rows:  # what an engine records
        row.old_logprobs, row.steps = Rows([row]).score(model, learning.plain_passes()), np.zeros(5, int)
    metrics = learner.train(Rows(rows))
    assert metrics["checked_tokens"] == 25 and metrics["logprob_diff"] < 1e-5 and metrics["ratio"] == pytest.approx(1, abs=1e-4)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 2) as place:
        yield place


def test_a_full_disk_ends_the_run_in_one_line_and_leaves_the_last_checkpoint_in_force(disk: Path, tmp_path: Path) -> None:
    settings = learning.config(steps=20, optimizer={"lr": 1e-3})
    run = RunDir(disk / "run").create()
    learner = Learner(
        settings, run, learning.with_model(tmp_path) / "model", ranks=learning.Ranks(), device=learning.CPU, incarnation=1
    )  # fmt: skip
    saved = 0
    with pytest.raises(DiskFull, match=r"the checkpoint of step \d+ cannot be written: .*checkpoints has no room \(\d MiB free\)\. Make"):
        for _ in range(20):
            learner.train(batch(learner))
            learner.save(None)
            saved = learner.step
    assert saved >= 2 and checkpoint.newest(run) == (saved, [])
    assert not list(run.checkpoints.glob(".*")), "nothing half-written takes what room there is"
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(DiskFull, match=r"the weights 1\.\d+\.safetensors cannot be written"):
        learner.publish()
    assert not list(run.weights.iterdir())
    filler.unlink()
    checkpoint.prune(run, 1, upto=saved)
    assert learner.save(None) == checkpoint.path(run, learner.step) and checkpoint.latest(run) == learner.step


@pytest.mark.parametrize("zero", [0, 3])
def test_bfloat16_computes_the_step_about_as_float32_does_and_leaves_the_weights_in_float32(tmp_path: Path, zero: int) -> None:
    own = {"strategy": "deepspeed", "deepspeed": {"zero": zero}} if zero else {}
    found = []
    for precision in ("float32", "bfloat16"):
        settings = learning.config(precision=precision, logprob_bound=0.1, optimizer={"lr": 1e-3}, gradient_checkpointing=True, **own)
        learner = learning.learner_of(settings, learning.with_model(tmp_path / precision))
        rows = learning.rollouts(0)
        for row in rows:
            row.old_logprobs = np.full(5, -3.0, np.float32)
            row.steps = np.full(5, -1)
        found.append(learner.train(Rows(rows)))
        assert all(value.dtype == torch.float32 for _, value in learner.strategy.tensors())
    for name in ("loss", "grad_norm", "entropy"):
        assert found[1][name] == pytest.approx(found[0][name], rel=0.05, abs=0.02)
        assert found[1][name] != found[0][name], "it is another precision"


def settings_of(**train: object) -> Config:
    return learning.config(**train)


def test_the_newest_and_the_best_checkpoints_are_kept_and_what_they_stand_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    rates = {2: 0.25, 4: 0.75, 6: 0.75, 8: 0.5, 10: 0.0}
    model = learning.small_model()
    with MetricsWriter(run.metrics) as writer:
        for step in range(1, 11):
            writer.append(StepMetrics(step=step, reward_mean=0.9 if step == 3 else step / 20))
            if step in rates:
                writer.append({"event": "eval", "label": f"step-{step}", "step": step})
    for step, rate in rates.items():
        for sample in range(4):
            folder = run.rollouts / f"eval-step-{step}-000-{sample}"
            folder.mkdir()
            reward = float(sample < 4 * rate)
            record = make_record(folder.name, reward, group=None, key=folder.name, purpose="eval", task_name="t")
            (folder / "result.json").write_text(record.model_dump_json())
    for step in (0, *rates):
        checkpoint.save(run, step, None, learning.Ranks(), model=model, lora=None, tokenizer_from=tmp_path, extra={})
        file = checkpoint.path(run, step) / "optimizer.pt"
        torch.save({}, file)
        if step == 6:
            retention.prune(run, settings_of(keep_checkpoints=3, keep_best="heldout").train, upto=6)
            assert checkpoint.steps(run) == [2, 4, 6]
    assert retention.best(run, "heldout") == 6, "of equals the later one"
    assert retention.best(run, "reward") == 2, "the weights after two steps are first used in step 3"
    (checkpoint.path(run, 6) / "model.safetensors").write_bytes(b"")
    assert retention.best(run, "heldout") == 4, "what is damaged is no best"
    retention.prune(run, settings_of(keep_checkpoints=1, keep_best="heldout").train, upto=10)
    assert checkpoint.steps(run) == [4, 10]
    checkpoint.save(run, 0, None, learning.Ranks(), model=model, lora=None, tokenizer_from=tmp_path, extra={})
    retention.prune(run, settings_of(keep_checkpoints=1, lora={"rank": 2}).train, upto=10)
    assert checkpoint.steps(run) == [0, 10], "adapters stand beside checkpoint 0"
    retention.prune(run, settings_of(keep_checkpoints=1, sft={"demonstrations": "d"}).train, upto=10)
    assert checkpoint.steps(run) == [0, 10], "what the supervised start made is nowhere else"
