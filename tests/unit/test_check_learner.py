"""What of a config cannot come true together is one line before anything is started; and what a source's function is called with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from forge_ray.cli.check import require
from forge_ray.config import load
from forge_ray.errors import UserError
from tests.task_maker import make_task


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run.yaml that nothing is wrong with."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "model" / "chat_template.jinja").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "make.py").write_text(
        "def tasks(out, seed, count=3, *, kind='a'): ...\ndef needy(out, seed, size): ...\ndef any(out, seed, **options): ...\n"
    )
    (tmp_path / "judge.py").write_text("def score(rollout): return 1\n")
    make_task(tmp_path / "tasks" / "one")
    tree = {
        "name": "bad", "runs": "runs", "policy": {"model": "model"}, "harnesses": [{"name": "react"}],
        "tasks": {"train": "tasks", "heldout": "tasks"}, "ray": {"address": "local"},
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def test_what_goes_together_is_not_refused(config: Path) -> None:
    for given in (
        [],
        ["train.keep_best=heldout"],
        ["train.precision=bfloat16", "train.logprob_bound=0.05"],
        ["train.precision=bfloat16", "train.steps=0"],
        ["policy.sampling.top_p=0.9", "train.logprob_bound=0.5"],
        ["train.credit.kind_weights={agent: 0}"],
        ["rollouts.reward=judge.py:score", "rollouts.reward_weights={reward: 1, score: 1}"],
        ["tasks.heldout={path: 'make.py:tasks', options: {count: 3, kind: b, seed: 4}}"],
        ["tasks.heldout={path: 'make.py:any', options: {whatever: 3}}"],
    ):
        require(load(config, given), without=("packages", "proxy.port"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("policy.sampling.top_p=0.9", r"^policy\.sampling\.top_p: 0\.9 cuts .*logprob_bound = 0\.001; leave top_p out"),
        ("policy.sampling.top_k=20", r"^policy\.sampling\.top_k: 20 cuts"),
        ("policy.engine.max_model_length=8", r"^config: policy\.engine\.max_model_length is no .* did you mean max_model_len\?"),
        ("policy.server.served_model_name=x", r"^config: policy\.server\.served_model_name is set by the proxy itself"),
        ("train.precision=bfloat16", r"^train\.logprob_bound: 0\.001 is for float32; the engine computes in bfloat16"),
        ("policy.engine.dtype=bfloat16", r"^train\.logprob_bound: .* the trainer in float32"),
        ("train.keep_best=heldout eval.before=false eval.after=false", r"^train\.keep_best: heldout, and nothing is evaluated"),
        ("train.keep_best=heldout tasks.heldout=null", r"^train\.keep_best: "),
        ("train.keep_best=heldout train.offline.runs=[x]", r"^train\.keep_best: .* stored rollouts"),
        ("train.credit.kind_weights={agent: 0, subagent: 0, compaction: 0}", r"^train\.credit\.kind_weights: every kind"),
        ("rollouts.reward=judge.py:scor", r"^rollouts\.reward: .*judge\.py has no function 'scor'; it has score"),
        ("rollouts.reward=nowhere.py:f", r"^rollouts\.reward: .*nowhere\.py does not exist"),
        ("tasks.heldout={path: 'make.py:tasks', options: {cuont: 3}}", r"^tasks\.heldout\.options: .* no 'cuont'; it takes count, kind"),
        ("tasks.heldout=make.py:needy", r"^tasks\.heldout\.options: needy of make\.py needs 'size'"),
        ("train.loss={name: distillation, distillation: {teacher: other}}", r"^train\.loss\.distillation\.teacher: .*other is no model"),
    ],
)  # fmt: skip
def test_what_does_not_is_one_line(given: str, expected: str, config: Path) -> None:
    overrides = [given] if "{" in given else given.split()
    with pytest.raises(UserError, match=expected):
        require(load(config, overrides), without=("packages", "proxy.port"))


def test_options_are_a_function_s(config: Path) -> None:
    with pytest.raises(UserError, match=r"options are a function's, and tasks is none"):
        load(config, ["tasks.train.options.count=3"])
