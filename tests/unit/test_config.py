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
        ("train.optimizer.lr=fast", ["train.optimizer.lr", "fast", ":9"]),
        ("train.steps=-1", ["train.steps", "-1", ":8"]),
        ("proxy.port=70000", ["proxy.port"]),
        ("harnesses.5.name=x", ["harnesses.5.name", "index"]),
        ("train.steps.more=1", ["train.steps.more"]),
        ("nonsense", ["nonsense", "key.sub=value"]),
        ("name=../up", ["name"]),
        ("train.group_size=1", ["group_size"]),
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

    config = load(file, ["train.kind_weights.aux=0.5", "rollouts.on_outcome.harness=drop"])
    saved = tmp_path / "elsewhere" / "config.yaml"
    saved.parent.mkdir()
    saved.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load(saved) == config
    assert Config.model_validate(config.model_dump(mode="json")) == config
