"""What a model directory lacks, seen before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Policy
from forge_ray.model_files import model_problem, policy_problem, safetensors_problem, tokenizer_problem


def safetensors(size: int = 64) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}, "__metadata__": {"x": "y"}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    files: dict[str, bytes] = {
        "config.json": b'{"model_type": "qwen3"}',
        "model.safetensors": safetensors(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_whole_model_has_no_problem(model: Path) -> None:
    assert policy_problem(Policy.model_validate({"model": "m"}), model) is None
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert model_problem(model) is None
    for name in ("chat_template.jinja", "chat_template.json"):
        (model / "tokenizer_config.json").write_text("{}")
        (model / name).write_text("x")
        assert tokenizer_problem(model, template=True) is None
        (model / name).unlink()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "no model directory"),
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[]", "holds no JSON object"),
        ("config.json", b"[" * 100_000, "is not JSON"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", b"", "truncated"),
        ("model.safetensors", safetensors()[:40], "truncated: its header alone"),
        ("model.safetensors", safetensors()[:-1], "truncated"),
        ("model.safetensors", safetensors() + b"x", "damaged"),
        ("model.safetensors", b"\x08" + bytes(7) + b"[[[[[[[[" + bytes(99), "no safetensors file"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "no safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "other.safetensors"}}', "other.safetensors is missing"),
        ("tokenizer_config.json", b"{}", "no chat template"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", None, "no chat template"),
        ("tokenizer_config.json", b'{"chat_template": "{% for x in %}"}', "is no Jinja template (line 1: Expected an expression"),
        ("chat_template.jinja", b"\n{% for x in %}", "chat_template.jinja is no Jinja template (line 2"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
    ],
)
def test_what_is_missing_or_damaged_is_named(model: Path, name: str, content: bytes | None, words: str) -> None:
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    problem = policy_problem(Policy.model_validate({"model": "m"}), model)
    assert problem is not None and words in problem and str(model) in problem and "\n" not in problem


@pytest.mark.parametrize(
    "policy",
    [
        {"server": {"chat_template": "x"}},
        {"engine": {"tokenizer": "elsewhere"}},
        {"engine": {"tokenizer_mode": "mistral"}},
    ],
)
def test_a_template_may_come_from_elsewhere(model: Path, policy: dict[str, Any]) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    assert policy_problem(Policy.model_validate({"model": "m", **policy}), model) is None


def test_what_transformers_adds_to_jinja_is_known_and_the_policys_own_template_is_looked_at(model: Path) -> None:
    good = "{% for m in messages %}{% if not m %}{% continue %}{% endif %}{%- generation -%}x{% endgeneration %}{% endfor %}"
    (model / "chat_template.jinja").write_text(good)
    own = model / "own.jinja"
    policy = Policy.model_validate({"model": "m", "chat_template": str(own)})
    assert tokenizer_problem(model, template=True) is None
    own.write_text("{{ x")
    assert f"{own} is no Jinja template" in (policy_problem(policy, model) or "")
    (model / "chat_template.jinja").write_text("{{ x")  # not used
    own.write_text(good)
    assert policy_problem(policy, model) is None


def test_a_script_needs_no_weights_and_a_chat_needs_a_tokenizer(model: Path) -> None:
    (model / "model.safetensors").unlink()
    scripted = Policy.model_validate({"model": "m", "script": "s.json"})
    assert policy_problem(scripted, model) is None
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in (policy_problem(scripted, model) or "")
    shutil.rmtree(model)
    assert "has no tokenizer" in (policy_problem(scripted, model) or "")
    assert "cannot be read" in (safetensors_problem(model / "x") or "")
