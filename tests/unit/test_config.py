"""The configuration tree: overrides, paths, and one clear line for every kind of mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_ray.config import Config, known_keys, load
from forge_ray.errors import UserError

BASE = """\
name: demo
policy: {model: policy.py:build}
harnesses: [{name: react}]
tasks:
  train: tasks.py:train
  heldout: tasks/heldout
train:
  steps: 3
  optimizer: {lr: 1e-6}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(path, list(overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_paths_are_taken_from_the_config_files_directory(file: Path) -> None:
    config = load(file)
    assert config.policy.model.function == (file.parent / "policy.py", "build")
    assert config.tasks.heldout is not None and config.tasks.heldout.path == str(file.parent / "tasks/heldout")
    assert Path(config.runs).is_absolute() and "~" not in config.runs


def test_yaml_reads_1e_6_as_a_number_in_the_file_and_in_an_override(file: Path) -> None:
    assert load(file).train.optimizer.lr == 1e-6
    assert load(file, ["train.optimizer.lr=2e-5"]).train.optimizer.lr == 2e-5


def test_overrides_reach_sections_lists_free_mappings_and_plain_sources(file: Path) -> None:
    config = load(
        file,
        [
            "train.steps=7",
            "policy.engine.max_model_len=256",
            "harnesses.0.options.output_chars=60",
            "policy.model.options.width=3",
            "eval.before=false",
        ],
    )
    assert config.train.steps == 7
    assert config.policy.engine == {"max_model_len": 256}
    assert config.harnesses[0].options == {"output_chars": 60}
    assert config.policy.model.options == {"width": 3} and config.policy.model.path.endswith("policy.py:build")
    assert config.eval.before is False


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.num-steps=3", ["train.num-steps", "train.steps"]),
        ("train.max-staleness=3", ["train.max_staleness"]),
        ("train.lr=3", ["train.lr", "train.optimizer.lr"]),
        ("steps=3", ["unknown key steps", "train.steps"]),
        ("train.optimizer.lr=fast", ["command line: train.optimizer.lr: ", "fast"]),
        ("train.steps=-1", ["command line: train.steps: ", "-1"]),
        ("train={steps: -1}", ["command line: train: train.steps", "-1"]),
        ("policy.model.options=3", ["command line: policy.model.options: "]),
        ("train.setps=3", ["command line: train.setps: unknown key"]),
        ("train.optimizer.lr=.inf", ["train.optimizer.lr"]),
        ("train.optimizer.lr=.nan", ["train.optimizer.lr"]),
        ("train.optimizer.betas=[0.9, 1]", ["train.optimizer.betas.1"]),
        ("train.optimizer.betas=[-0.1, 0.9]", ["train.optimizer.betas.0"]),
        ("train.loss.clip_low=1.5", ["train.loss.clip_low"]),
        ("train.credit.gamma=1.5", ["train.credit.gamma"]),
        ("train.logprob_bound=.inf", ["train.logprob_bound"]),
        ("policy.sampling.top_p=1.1", ["policy.sampling.top_p"]),
        ("policy.sampling.top_p=0", ["policy.sampling.top_p"]),
        ("policy.sampling.top_k=-1", ["policy.sampling.top_k"]),
        ("policy.sampling.temperature=0.001", ["policy.sampling.temperature"]),
        ("policy.eval_sampling.top_p=2", ["policy.eval_sampling.top_p"]),
        ("policy.served_name=a b", ["policy.served_name", "'a b' is refused; write letters"]),
        ("policy.served_name=''", ["policy.served_name"]),
        ("policy.environment={'A=B': x}", ["policy.environment", "'A=B'", "without ="]),
        ("proxy.upstreams={judge: {url: 'host:80'}}", ["proxy.upstreams.judge.url: 'host:80' is refused; write http://HOST:PORT/v1"]),
        ("proxy.upstreams={judge: {url: 'http://h', key_env: sk-1}}", ["key_env", "not the key"]),
        ("sandbox.memory_mb=99999999999999999999", ["sandbox.memory_mb"]),
        ("ray.object_store_mb=1", ["ray.object_store_mb"]),
        ("seed=-1", ["seed"]),
        ("rollouts.on_outcome.harness=train", ["rollouts", "on_outcome.harness = train", "no reward"]),
        ("rollouts.on_outcome.ok=drop", ["on_outcome.ok = drop"]),
        ('runs="\\udc80"', ["command line: runs"]),
        ('runs="a\\0b"', ["command line: runs", "NUL"]),
        ("policy.engine={x: &a [*a]}", ["command line: policy.engine.x", "contains itself"]),
        ("proxy.port=70000", ["proxy.port"]),
        ("harnesses.5.name=x", ["harnesses.5.name", "index"]),
        ("train.steps.more=1", ["train.steps.more"]),
        ("nonsense", ["nonsense", "key.sub=value"]),
        ("name=off", ["name = False is refused", "write it in quotes"]),
        ("name=", ["name = None is refused", "correct the value"]),
        ("name=../up", ["name: '../up' is refused; write letters"]),
        ("train.group_size=1", ["command line: train.group_size: train.group_size must be at least 2"]),
        ("train.loss.importance.level=token", ["command line: train.loss.importance.level: train.loss: importance.level = token"]),
        (
            "train.loss={name: distillation, distillation: {upstream: nobody}}",
            ["command line: train.loss: train.loss.distillation.upstream"],
        ),
        ("train.learning_rate=1", ["unknown key train.learning_rate; see docs/configuration.md"]),
    ],
)
def test_a_wrong_override_is_one_line_with_key_place_and_fix(file: Path, override: str, words: list[str]) -> None:
    text = message(file, override)
    for word in words:
        assert word in text


def test_a_missing_file_a_bad_indent_and_a_list_are_one_line(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\n policy: 3\n")
    assert f"{bad}:2" in message(bad)
    bad.write_text("- 1\n- 2\n")
    assert "mapping" in message(bad)
    bad.write_bytes(b"name: \xff\n")
    assert "is not UTF-8 (invalid start byte at byte 6); save it" in message(bad)
    assert message(tmp_path) == f"{tmp_path}: is a directory; give the path of a run.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BASE + "name: other\n", [":10: name stands twice, first in line 1"]),
        (BASE.replace("  steps: 3\n", "  steps: 3\n  steps: 4\n"), [":9: steps stands twice, first in line 8"]),
        (BASE.replace("{model: policy.py:build}", "{model: a, model: b}"), [":2: model stands twice, first in line 2"]),
        (BASE.replace("demo", "2020-13-45"), [":1: 2020-13-45 is no value (month must be in 1..12)", "quote it"]),
        (BASE + "seed: !!int x\n", [":10: x is no value"]),
        (BASE + "x: " + "[" * 5000 + "]" * 5000, ["nested too deeply"]),
        (BASE.replace("policy.py:build}", 'm, engine: {x: "\\0"}}'), [":2: policy.engine.x", "NUL"]),
        (BASE.replace("policy.py:build}", "m, engine: &e {x: *e}}"), [":2: policy.engine.x", "contains itself"]),
        (BASE.replace("policy.py:build}", "m, engine: {[a]: b}}"), [":2", "not valid YAML"]),
        (BASE + "---\n" + BASE, ["not valid YAML"]),
        (BASE.replace("demo", '!!python/object/apply:os.system ["id"]'), [":1", "not valid YAML"]),
        ("1: 2\n" + BASE, [":1: ", "Keys should be strings"]),
        (BASE.replace("  steps: 3\n", "  steps: -3\n"), [":8: train.steps = -3"]),
    ],
)
def test_what_a_file_may_not_hold_is_one_line_with_its_place(file: Path, text: str, words: list[str]) -> None:
    file.write_text(text)
    said = message(file)
    assert said.startswith(str(file)) and "Traceback" not in said
    for word in words:
        assert word in said


def test_an_overrides_error_is_not_laid_on_the_file_and_the_files_not_on_an_override(file: Path) -> None:
    file.write_text(BASE.replace("  steps: 3\n", "  steps: -3\n"))
    assert f"{file}:8: train.steps" in message(file, "train.group_size=4", "train.optimizer.lr=1e-5")
    assert load(file, ["train.steps=2", "name='2020-13-45'"]).name == "2020-13-45"
    assert load(file, ["train.steps=2", "name=2020-13-45"]).name == "2020-13-45", "what is no value is text"


def test_anchors_and_merge_keys_still_work(file: Path) -> None:
    base = BASE.replace("{model: policy.py:build}", "{model: m, engine: &e {a: 1, b: 2}, server: {<<: *e, b: 3}}")
    file.write_text(base)
    assert load(file).policy.server == {"a": 1, "b": 3}


def test_without_held_out_tasks_nothing_is_evaluated(file: Path) -> None:
    text = file.read_text().replace("  heldout: tasks/heldout\n", "")
    file.write_text(text)
    config = load(file, ["eval.every=2", "eval.samples=3"])
    assert config.tasks.heldout is None and config.eval.samples == 3
    assert not (config.eval.before or config.eval.after or config.eval.every)


def test_the_engine_samples_in_the_precision_that_is_trained_in(file: Path) -> None:
    assert load(file).engine_dtype == "float32"
    assert load(file, ["train.precision=bfloat16"]).engine_dtype == "bfloat16"
    assert load(file, ["train.precision=bfloat16", "policy.engine.dtype=auto"]).engine_dtype == "auto"


def test_every_key_is_documented() -> None:
    undocumented = [key for key, text in known_keys().items() if not text]
    assert undocumented == []


def test_a_saved_config_loads_to_the_same_config(file: Path, tmp_path: Path) -> None:
    import yaml

    config = load(file, ["train.credit.kind_weights.aux=0.5", "rollouts.on_outcome.harness=drop"])
    saved = tmp_path / "elsewhere" / "config.yaml"
    saved.parent.mkdir()
    saved.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load(saved) == config
    assert Config.model_validate(config.model_dump(mode="json")) == config
