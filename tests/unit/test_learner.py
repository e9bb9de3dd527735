"""One GRPO step, SFT, checkpoints and weight files: real torch, a very small Qwen3, no Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn
from transformers import Qwen3ForCausalLM

from forge_ray.config import Config, Sft
from forge_ray.run_dir import RunDir, next_incarnation, write_json
from forge_ray.train_loop import checkpoint, forward, models, sft, weight_sync
from forge_ray.train_loop.agreement import LogprobMismatch
from forge_ray.train_loop.exchange import CLOSED, Exchange
from forge_ray.train_loop.forward import Row
from forge_ray.train_loop.history import WeightHistory
from forge_ray.train_loop.part import Passes
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.rows import Rows
from forge_ray.train_loop.strategies import Strategy
from forge_ray.train_loop.strategies.ddp import Replicated
from forge_ray.train_loop.update import Diverged, Guard, train_step
from tests.unit.learning import CPU, VOCABULARY, config, rollouts, small_model


def batch(model: torch.nn.Module, step: int, count: int = 6) -> list[Row]:
    """Rows as the engine would have recorded them with the weights of `model`, at two temperatures."""
    rows = rollouts(step, count)
    for row in rows:
        with torch.no_grad():
            row.old_logprobs = forward.token_logprobs(model, forward.collate([row]))[0].numpy()
    return rows


def strategy_of(model: torch.nn.Module, settings: Config, ranks: Ranks | None = None) -> Replicated:
    return Replicated(model, settings.train.optimizer, ranks or Ranks(), CPU)


def step_of(strategy: Strategy, rows: list[Row], settings: Config, step: int, ranks: Ranks | None = None, **more: Any) -> dict[str, Any]:
    own = settings.train.optimizer
    passes = Passes(CPU, own.microbatch_tokens, ranks or Ranks(), lockstep=strategy.lockstep)
    given: dict[str, Any] = {"others": {}, "history": WeightHistory(1), "guard": Guard(own), **more}
    return train_step(strategy, Rows(rows), settings, step, passes=passes, **given)


def saved(run: RunDir, step: int, model: Any, strategy: Strategy | None, source: Path, **extra: Any) -> Path:
    return checkpoint.save(run, step, strategy, Ranks(), model=model, lora=None, tokenizer_from=source, extra=extra)


def test_a_step_raises_what_was_rewarded_and_lowers_what_was_not() -> None:
    model, settings = small_model(), config(optimizer={"lr": 3e-3, "epochs": 2, "minibatches": 2})
    rows = batch(model, 0)
    metrics = step_of(strategy_of(model, settings), rows, settings, 0)
    assert metrics["logprob_diff"] < 1e-6 and metrics["updates"] == 4
    with torch.no_grad():
        change = {
            row.name: float((forward.token_logprobs(model, forward.collate([row]))[0].numpy() - row.old_logprobs).mean()) for row in rows
        }
    up, down = [change[row.name] for row in rows if row.advantages[0] > 0], [change[row.name] for row in rows if row.advantages[0] < 0]
    assert sum(up) / len(up) > 0.02 > -0.02 > sum(down) / len(down)


def test_an_engine_that_holds_other_weights_stops_the_step_before_anything_changes() -> None:
    model, settings = small_model(), config(optimizer={"lr": 1e-3})
    rows = batch(small_model(seed=1), 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LogprobMismatch, match="logprob_bound"):
        step_of(strategy_of(model, settings), rows, settings, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("engine", "precision", "said"),
    [
        ({}, "float32", "weights, template"),
        ({"dtype": "float"}, "float32", "weights, template"),
        ({"dtype": "bfloat16"}, "float32", r"dtype = bfloat16, the trainer in train\.precision = float32: leave"),
        ({"dtype": "auto"}, "float32", "dtype = auto"),
        ({}, "bfloat16", r"raise train\.logprob_bound, or set train\.precision=float32"),
    ],
)
def test_the_mismatch_names_the_remedy_where_the_precisions_differ(engine: dict[str, str], precision: str, said: str) -> None:
    settings = config(precision=precision)
    settings = settings.model_copy(update={"policy": settings.policy.model_copy(update={"engine": engine})})
    model = small_model()
    with pytest.raises(LogprobMismatch, match=said):
        step_of(strategy_of(model, settings), batch(small_model(seed=1), 0), settings, 0)


def test_stale_tokens_are_checked_against_the_weights_that_sampled_them() -> None:
    model, settings, history = small_model(), config(optimizer={"lr": 1e-2}), WeightHistory(1)
    strategy = strategy_of(model, settings)
    first, second = batch(model, 0), batch(model, 0, 4)
    step_of(strategy, first, settings, 0, history=history)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        moved = forward.token_logprobs(model, forward.collate(second))[0].numpy() - np.concatenate([row.old_logprobs for row in second])
    assert np.abs(moved).mean() > 1e-2
    metrics = step_of(strategy, second, settings, 1, history=history)
    assert metrics["checked_tokens"] == 20 and metrics["logprob_diff"] < 1e-6
    for row in second:
        row.old_logprobs = row.old_logprobs + 0.01
    model.load_state_dict(trained)
    with pytest.raises(LogprobMismatch, match="version 0"):
        history = WeightHistory(1)
        history.keep(0, [value.data for value in small_model().parameters()])
        step_of(strategy, second, settings, 1, history=history)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_tokens_of_weights_that_are_gone_are_no_reason_to_stop() -> None:
    model, settings = small_model(), config(optimizer={"lr": 1e-3})
    metrics = step_of(strategy_of(model, settings), batch(small_model(seed=1), 0), settings, 1)
    assert "logprob_diff" not in metrics and metrics["checked_tokens"] == 0


def test_nan_in_the_recording_stops_the_step_by_name() -> None:
    from forge_ray.train_loop.losses import NotFinite

    model, settings = small_model(), config()
    rows = batch(model, 0)
    rows[0].advantages = rows[0].advantages.copy()
    rows[0].advantages[2] = np.nan
    with pytest.raises(NotFinite, match="advantages"):
        step_of(strategy_of(model, settings), rows, settings, 0)


def test_micro_batches_do_not_change_the_gradient() -> None:
    results = []
    for tokens in (100_000, 25):
        model, settings = small_model(), config(optimizer={"lr": 1e-3, "microbatch_tokens": tokens})
        metrics = step_of(strategy_of(model, settings), batch(model, 0), settings, 0)
        results.append((metrics["loss"], metrics["grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_two_ranks_with_ddp_make_the_same_step_as_one(tmp_path: Path) -> None:
    model, settings = small_model(), config(optimizer={"lr": 1e-3, "minibatches": 1})
    rows = batch(model, 0, 5)
    expected = step_of(strategy_of(model, settings), rows, settings, 0)
    spawn(_rank, args=(str(tmp_path), settings.model_dump(mode="json")), nprocs=2)
    for rank in range(2):
        got = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in ("loss", "grad_norm", "ratio", "logprob_diff"):
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        weights = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def _rank(rank: int, folder: str, tree: dict[str, Any]) -> None:
    import torch.distributed as dist

    from forge_ray.train_loop.ranks import of_process

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, settings = small_model(), Config.model_validate(tree)
    rows = batch(model, 0, 5)
    # Four rollouts here, one there, and a second micro-batch on one rank only.
    mine = rows[:4] if rank == 0 else rows[4:]
    settings = settings.model_copy(
        update={
            "train": settings.train.model_copy(update={"optimizer": settings.train.optimizer.model_copy(update={"microbatch_tokens": 40})})
        }
    )
    ranks = of_process(CPU)
    metrics = step_of(strategy_of(model, settings, ranks), mine, settings, 0, ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(metrics))
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run_directory(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run").create()
    write_json(run.state, {"incarnation": 0, "secret": "00"})
    return run


def test_a_resumed_run_makes_the_same_steps_as_a_straight_one(tmp_path: Path) -> None:
    settings = config(optimizer={"lr": 1e-3, "lr_end": 1e-4, "epochs": 2, "minibatches": 2})
    batches = [batch(small_model(seed=step), step) for step in range(4)]
    for step, rows in enumerate(batches):
        for row in rows:
            row.steps = np.full(5, step - 1)

    def go(strategy: Replicated, steps: range) -> list[dict[str, Any]]:
        return [step_of(strategy, batches[step], settings, step) for step in steps]

    model = small_model()
    strategy = strategy_of(model, settings)
    straight = go(strategy, range(4))
    run = run_directory(tmp_path)
    first = small_model()
    before = strategy_of(first, settings)
    got = go(before, range(2))
    saved(run, 2, first, before, tmp_path, incarnation=1)
    torch.manual_seed(99)
    loaded = Qwen3ForCausalLM.from_pretrained(checkpoint.path(run, 2), dtype=torch.float32).train()
    after = strategy_of(loaded, settings)
    checkpoint.restore(run, 2, after, Ranks())
    got += go(after, range(2, 4))
    assert got == straight
    for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(strategy.optimizer.state[one][moment], after.optimizer.state[other][moment])


def test_a_crash_during_a_save_leaves_the_previous_checkpoint_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, model, settings = run_directory(tmp_path), small_model(), config()
    strategy = strategy_of(model, settings)
    saved(run, 1, model, strategy, tmp_path)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(run, 2, model, strategy, tmp_path)
    assert checkpoint.latest(run) == 1


def test_a_resume_that_cannot_be_exact_is_refused(tmp_path: Path) -> None:
    run, model, settings = run_directory(tmp_path), small_model(), config()
    strategy = strategy_of(model, settings)
    saved(run, 1, model, strategy, tmp_path)
    (checkpoint.path(run, 1) / "optimizer.pt").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="exact"):
        checkpoint.restore(run, 1, strategy, Ranks())


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng.pt", "trainer.json", "config.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "empty"])
@pytest.mark.parametrize("old", [False, True])
def test_a_damaged_checkpoint_is_left_out_and_named(tmp_path: Path, name: str, how: str, old: bool) -> None:
    run, model = run_directory(tmp_path), small_model()
    for step in (1, 2):
        saved(run, step, model, strategy_of(model, config()), tmp_path, seed=1)
    directory = checkpoint.path(run, 2)
    if old:  # written before the sizes were
        (directory / "trainer.json").write_text('{"step": 2}')
    assert checkpoint.newest(run) == (2, [])
    file = directory / name
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 if how == "cut" else 0])
    step, wrong = checkpoint.newest(run)
    assert step == 1 and len(wrong) == 1 and str(file if file.exists() else directory) in wrong[0]
    assert checkpoint.latest(run) == 1
    (checkpoint.path(run, 1) / name).unlink()
    (checkpoint.path(run, 1) / "config.json").unlink(missing_ok=True)
    with pytest.raises(checkpoint.CheckpointError, match=f"(?s)no checkpoint of {run.root} is whole.*step-000002.*step-000001"):
        checkpoint.latest(run)


def test_weights_that_look_whole_and_are_not_end_in_one_typed_line(tmp_path: Path) -> None:
    run, model = run_directory(tmp_path), small_model()
    directory = saved(run, 1, model, strategy_of(model, config()), tmp_path)
    for name, content in (("config.json", b'{"model_type": "no-such-model"}'), ("model.safetensors", b"{" * 64)):
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(content)
        with pytest.raises(models.ModelError, match=str(directory)) as caught:
            models.load(directory)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        (directory / name).write_bytes(whole)
    strategy = strategy_of(model, config())
    for content in (b"", b"PK\x03\x04" + b"\0" * 30, b"no archive"):
        (directory / "optimizer.pt").write_bytes(content)
        with pytest.raises(checkpoint.CheckpointError, match=str(directory)):
            checkpoint.restore(run, 1, strategy, Ranks())


def test_old_checkpoints_go_but_not_the_protected_one(tmp_path: Path) -> None:
    run, model = run_directory(tmp_path), small_model()
    for step in range(5):
        saved(run, step, model, None, tmp_path)
    checkpoint.prune(run, 1, upto=3, protect=[0])
    assert checkpoint.steps(run) == [0, 3, 4], "4 is none of those that count: it was left out as damaged"


def test_published_weights_are_the_models_and_current_names_them(tmp_path: Path) -> None:
    run, model = run_directory(tmp_path), small_model()
    assert weight_sync.current(run) is None
    for step in range(6):
        path = weight_sync.publish(run, weight_sync.collect(model.named_parameters()), f"1.{step}")
        weight_sync.make_current(run, path, f"1.{step}")
    current = weight_sync.current(run)
    assert current is not None and current["version"] == "1.5"
    tensors = load_file(current["path"])
    assert set(tensors) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(tensors[name], value) for name, value in model.named_parameters())
    assert len(list(run.weights.glob("*.safetensors"))) == weight_sync.KEPT
    moved = RunDir(run.root.rename(tmp_path / "moved"))
    current = weight_sync.current(moved)
    assert current is not None and Path(current["path"]).is_file() and current["path"].startswith(str(moved.root))


def test_every_start_of_a_worker_group_has_an_incarnation_of_its_own(tmp_path: Path) -> None:
    run = run_directory(tmp_path)

    async def begin_twice() -> list[int]:
        exchange = Exchange(str(run.root))
        return [await exchange.begin(), await exchange.begin()]

    assert [next_incarnation(run), *asyncio.run(begin_twice())] == [1, 2, 3]


def test_the_exchange_serves_a_step_again_until_a_checkpoint_follows_it(tmp_path: Path) -> None:
    async def story() -> None:
        exchange = Exchange(str(tmp_path))
        waiting = asyncio.create_task(exchange.get_step(0, 0))
        await asyncio.sleep(0)
        await exchange.put_step(0, ["table"], {"tokens": 3})
        await exchange.put_step(0, ["another"], {})
        assert await waiting == {"ref": ["table"], "stats": {"tokens": 3}} == await exchange.get_step(0, 0)
        await exchange.forget_before(1)
        await exchange.post({"kind": "progress"})
        assert await exchange.events(0) == [{"kind": "progress"}] and await exchange.events(1, 0.01) == []
        await exchange.close()
        assert await exchange.get_step(0, 0) == CLOSED

    asyncio.run(story())


def supervised(
    rows: list[Row], recipe: Sft, report: Callable[[int, float], None], max_tokens: int = 10_000, model: torch.nn.Module | None = None
) -> None:
    strategy = Replicated(model or small_model(), recipe.optimizer, Ranks(), CPU)
    sft.train(strategy, rows, recipe, 7, passes=Passes(CPU, max_tokens), report=report)


def test_sft_learns_its_demonstrations_and_its_order_follows_from_the_seed() -> None:
    import pyarrow

    draw = np.random.default_rng(0)
    ids = [[1, int(k), 2, int(k), int(k)] for k in draw.integers(3, VOCABULARY, 64)]
    table = pyarrow.table({"ids": ids, "mask": [[False, False, False, True, True]] * 64})
    rows = forward.demonstration_rows(table)
    settings = config(sft={"demonstrations": "d", "steps": 60, "batch_size": 16, "lr": 1e-2}).train.sft
    assert settings is not None
    runs = []
    for _ in range(2):
        losses: list[tuple[int, float]] = []
        supervised(rows, settings, lambda step, loss, into=losses: into.append((step, loss)))
        runs.append(losses)
    assert runs[0] == runs[1]
    assert runs[0][-1][0] == 60 and runs[0][-1][1] < 0.6 * runs[0][0][1]


def test_sft_stops_at_a_gradient_that_is_not_finite_before_it_moves_a_weight() -> None:
    import pyarrow

    rows = forward.demonstration_rows(pyarrow.table({"ids": [[1, 2, 3, 4]] * 4, "mask": [[False, False, True, True]] * 4}))
    settings = config(sft={"demonstrations": "d", "steps": 3, "batch_size": 2}).train.sft
    assert settings is not None
    model = small_model()
    weight = next(model.parameters())
    weight.register_hook(lambda gradient: gradient * torch.inf)
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(Diverged, match=r"supervised start, update 1: .*lower train\.sft\.lr"):
        supervised(rows, settings, lambda step, loss: None, 100, model)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("max_tokens", [10_000, 6])
def test_sft_on_tries_learns_what_it_learns_on_rows(max_tokens: int) -> None:
    import pyarrow

    draw = np.random.default_rng(0)
    ids = [[1, 2, 3, *map(int, draw.integers(3, 6, 4))] for _ in range(12)]  # few different ones: alike to any depth, also wholly
    masks = [[False, False, True, *(draw.random(4) < 0.6).tolist()] for _ in range(12)]
    rows = forward.demonstration_rows(pyarrow.table({"ids": ids, "mask": masks}))
    losses: dict[str, list[float]] = {}
    for builder in ("rows", "tree"):
        settings = config(sft={"demonstrations": "d", "steps": 5, "batch_size": 6, "builder": builder}).train.sft
        assert settings is not None
        losses[builder] = []
        supervised(rows, settings, lambda step, loss, into=losses[builder]: into.append(loss), max_tokens)
    assert losses["tree"] == pytest.approx(losses["rows"], rel=1e-5) and len(set(losses["rows"])) == 5
