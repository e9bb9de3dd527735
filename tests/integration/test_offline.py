"""Training on stored rollouts with the real trainer: a run that is stopped, killed and resumed trains what a straight one does.

The stored run is made by hand: calls sampled from the tiny model by transformers, with its log-probabilities, of ten tasks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from forge_ray.cli.main import main
from forge_ray.config import Config
from forge_ray.job import library
from forge_ray.run_dir import RunDir
from forge_ray.trajectories.store.reader import StoreReader
from tests.reference import Reference
from tests.stored_run import store, stored_run
from tests.tiny_model import tiny_model
from tests.unit.making import make_call, make_record

STEPS = 4


def settings(runs: Path, address: str, **train: Any) -> dict[str, Any]:
    return {
        "name": "offline", "runs": str(runs), "seed": 5, "policy": {"model": str(tiny_model())}, "harnesses": [{"name": "react"}],
        "tasks": {"train": str(runs)}, "ray": {"address": address},
        "train": {
            "steps": STEPS, "groups_per_step": 4, "group_size": 2, "checkpoint_every": 1, "keep_checkpoints": 2, "threads": 1,
            "optimizer": {"lr": 1e-3, "lr_end": 1e-4}, **train,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A stored run of ten groups of two rollouts, two calls each."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)

    def sample(prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt), []
        with torch.no_grad():
            for _ in range(count):
                row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1)
                token = int(torch.multinomial(row.exp(), 1, generator=generator))
                ids.append(token)
                logprobs.append(float(row[token]))
        return ids[len(prompt) :], logprobs

    runs = tmp_path_factory.mktemp("runs")
    tree = {**settings(runs, "local"), "name": "recorded"}
    run = stored_run(runs / "recorded", Config.model_validate(tree))
    rollouts = []
    for group in range(10):
        prompt = torch.randint(10, 2000, (6,), generator=generator).tolist()
        for slot in range(2):
            name = f"g{group:05d}-{slot}.0"
            first, logprobs = sample(prompt, 4)
            second, more = sample([*prompt, *first, 7], 3)
            calls = [
                make_call(prompt, first, session=name, logprobs=logprobs),
                make_call([*prompt, *first, 7], second, session=name, order=1, logprobs=more),
            ]
            rollouts.append((make_record(name, float(slot), group=group, calls=2), calls))
    store(run, rollouts)
    return run


class Training:
    """`forge-ray train` in a process of its own."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.log = directory / f"{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forge_ray.cli.main", "train", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, found: Any) -> None:
        end = time.monotonic() + 400
        while not found() and self.process.poll() is None:
            assert time.monotonic() < end, self.text[-4000:]
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self) -> int:
        return self.process.wait(timeout=500)


def rows(run: Path) -> dict[int, dict[str, Any]]:
    found = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in found}


def published(run: Path) -> int:
    """Step of the newest weights that the trainer has written; -1 before the first."""
    versions = [file.name.split(".")[:2] for file in (run / "weights").glob("[!.]*.safetensors")]
    return max((int(step) for _, step in versions), default=-1)


def taught(run: Path) -> dict[int, tuple[Any, ...]]:
    """What each step trained and came to."""
    reader = StoreReader(str(run / "data"))
    samples = {
        step: sorted(zip(*(reader.samples(step)[name].to_pylist() for name in ("rollout", "ids")), strict=True)) for step in reader.steps()
    }
    names = ("lr", "loss", "policy_loss", "grad_norm", "ratio", "reward_mean", "tokens")
    return {step: (samples[step - 1], *(row[name] for name in names)) for step, row in rows(run).items()}


def test_an_offline_run_that_is_killed_and_resumed_trains_what_a_straight_one_does(cluster: None, source: RunDir, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address

    def begin(name: str) -> tuple[Training, Path]:
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings(tmp_path, address)))
        return Training(tmp_path, str(file), f"name={name}", "--from-rollouts", str(source.root)), tmp_path / name

    # Side by side: each is one process most of the time. One is killed when the weights of a step are out and before or while its
    # checkpoint is written.
    (straight, whole), (killed, run) = begin("straight"), begin("broken")
    killed.until(lambda: published(run) >= 1)
    killed.kill()
    assert len(rows(run)) < STEPS, "killed too late to show anything"
    assert straight.ended() == 0, straight.text
    assert "4 steps on 20 stored rollouts in 10 groups, of recorded; " in straight.text
    expected = taught(whole)
    assert sorted(expected) == [1, 2, 3, 4]
    assert abs(expected[1][5] - 1) < 1e-4, "at the first update the ratio to the recorded log-probabilities is 1"
    assert [round(expected[step][1], 7) for step in expected] == [1e-3, 7e-4, 4e-4, 1e-4]
    taken = [group for step in range(4) for group in StoreReader(str(whole / "data")).samples_store.stats(step)["taken"]]
    assert sorted(taken[:10]) == list(range(10)), "ten groups in steps of four: an epoch ends inside step 3"
    assert rows(whole)[1]["logprob_diff"] is None, "nothing is compared with weights that this run never had"
    assert (whole / "report.html").is_file() and (whole / "summary.json").is_file()

    # Resumed and stopped by a signal; then to the end.
    stopped = Training(tmp_path, "--resume", str(run))
    stopped.until(lambda: published(run) >= 3 or 2 in rows(run))
    if stopped.process.poll() is None:
        stopped.process.send_signal(signal.SIGINT)
    assert stopped.ended() in (0, 130), stopped.text
    last = Training(tmp_path, "--resume", str(run))
    assert last.ended() == 0, last.text
    assert taught(run) == expected


def test_a_teacher_s_recorded_and_fresh_log_probabilities_train_the_same(cluster: None, source: RunDir, tmp_path: Path) -> None:
    """Recorded ones of a server that is not there any more; fresh ones of its model directory."""
    import ray

    from forge_ray.trajectories.ratings import Rating
    from forge_ray.trajectories.store import ratings
    from forge_ray.trajectories.store.location import Location

    teacher = Reference(tiny_model()).changed(3)
    teacher.model.save_pretrained(tmp_path / "teacher")
    for file in tiny_model().glob("tokenizer*"):
        shutil.copy(file, tmp_path / "teacher")
    said: dict[int, list[tuple[list[float], list[float]]]] = {}
    """Group -> of each call the policy's log-probabilities and the teacher's."""
    rated = []
    for record, calls in library.Recordings(source).with_calls(list(library.records(source))):
        for ordinal, call in enumerate(calls):
            logprobs = teacher.logprobs(call.prompt_ids, call.ids, 1.0)
            said.setdefault(record.group or 0, []).append((call.logprobs, logprobs))
            rated.append(Rating(record.id, call.id, ordinal, np.array(logprobs, np.float32)))
    ratings.put(Location.of(source.data), 0, "big", "big", rated)
    address, running = ray.get_runtime_context().gcs_address, {}
    # And one of them on the tries of its steps, with everything shared out by DeepSpeed.
    shared = {"strategy": "deepspeed", "deepspeed": {"zero": 3}} if find_spec("deepspeed") else {}
    for name, who, own in (
        ("recorded", {"upstream": "big"}, {}),
        ("fresh", {"teacher": str(tmp_path / "teacher")}, {"builder": "tree", **shared}),
    ):
        tree = settings(tmp_path, address, loss={"name": "distillation", "distillation": who}, **own)
        tree["train"]["steps"], tree["proxy"] = 2, {"upstreams": {"big": {"url": "http://127.0.0.1:9"}}}
        (file := tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        running[name] = Training(tmp_path, str(file), f"name={name}", "--from-rollouts", str(source.root))
    for training in running.values():
        assert training.ended() == 0, training.text
    steps = {name: rows(tmp_path / name) for name in running}
    taken = StoreReader(str(tmp_path / "recorded" / "data")).samples_store.stats(0)["taken"]
    expected = [ours - theirs for group in taken for pair in said[group] for ours, theirs in zip(*pair, strict=True)]
    assert steps["recorded"][1]["teacher_kl"] == pytest.approx(np.mean(expected), abs=1e-4) and abs(np.mean(expected)) > 0.01
    for step in (1, 2):
        for key in ("teacher_kl", "loss", "grad_norm"):
            assert steps["recorded"][step][key] == pytest.approx(steps["fresh"][step][key], abs=1e-4, rel=1e-3), (step, key)


def test_what_cannot_be_trained_is_refused_in_one_line_and_leaves_nothing(
    source: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings(tmp_path, "local")))
    for words, said in (
        (["--from-rollouts", str(tmp_path / "nowhere")], "is no run"),
        (["--from-rollouts", str(source.root), "--rewards", "yesterday"], "there is no rescore 'yesterday'; give one of recorded, latest"),
        (
            ["--from-rollouts", str(source.root), "train.groups_per_step=11"],
            "10 groups of stored rollouts can be trained, and a step takes 11",
        ),
        (["--from-rollouts", str(source.root), "train.loss.stale.versions=1"], "mask by train.loss.stale.kl"),
        (["--rewards", "latest"], "rewards are chosen for stored rollouts; give --from-rollouts RUN with it"),
    ):
        assert main(["train", str(file), *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["train", "--resume", str(source.root), "--from-rollouts", str(source.root)]) == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.yaml"]
