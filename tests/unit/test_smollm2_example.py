"""The second example: its chat template, its configuration; with the converted model at hand, its tokens."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest

from forge_ray.config import load
from forge_ray.harnesses.react_program import TOOL
from tests.quickstart import module

DIRECTORY = Path(__file__).resolve().parents[2] / "examples" / "smollm2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge-ray" / "smollm2-135m-instruct-float32"


def render(messages: list[dict[str, Any]], tools: Any = (TOOL,), generate: bool = False) -> str:
    """As transformers renders: trimmed blocks, its own `tojson`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string((DIRECTORY / "chat_template.jinja").read_text())
    return template.render(messages=messages, tools=list(tools), add_generation_prompt=generate)


def call(arguments: Any, content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "bash", "arguments": arguments}}]}


def test_arguments_may_be_an_object_or_json_text_and_the_text_before_a_call_stays() -> None:
    for arguments in ({"command": "ls é"}, '{"command": "ls é"}'):
        assert render([call(arguments, "Look: ")], tools=()) == (
            '<|im_start|>assistant\nLook: <tool_call>{"name": "bash", "arguments": {"command": "ls é"}}</tool_call><|im_end|>\n'
        )


def test_the_history_and_the_tools_are_the_request_s() -> None:
    messages = [{"role": "user", "content": "go"}, call({"command": "ls"}), {"role": "tool", "content": ""}]
    text = render(messages, generate=True)
    assert text.startswith('<|im_start|>system\nTo use a tool, reply <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:\n')
    assert json.loads(text.split("Tools:\n")[1].partition("<|im_end|>")[0]) == TOOL["function"]
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n")
    systems = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "system", "content": "t"}]
    assert render(systems, tools=()) == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in systems)


def test_the_run_is_valid_and_shows_as_much_output_as_its_demonstrations() -> None:
    for directory in (DIRECTORY, DIRECTORY.parent / "quickstart"):
        config = load(directory / "run.yaml")
        assert config.train.sft is not None
        assert config.train.sft.demonstrations.options["output_chars"] == config.harnesses[0].options["output_chars"]
        for source in (config.policy.model, config.tasks.train, config.tasks.heldout, config.train.sft.demonstrations):
            assert source is not None and source.function is not None
            file, name = source.function
            assert f"def {name}(" in file.read_text()


@pytest.mark.skipif(not CACHE.is_dir() and os.environ.get("CI") != "true", reason=f"no converted model in {CACHE}")
def test_demonstrations_end_with_the_end_token_which_is_also_the_pad_token() -> None:
    teacher = module("teacher")
    from transformers import AutoTokenizer

    spec = importlib.util.spec_from_file_location("smollm2_policy", DIRECTORY / "policy.py")
    assert spec is not None and spec.loader is not None
    policy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(policy)
    tokenizer = policy.tokenizer()
    assert tokenizer.eos_token_id == tokenizer.pad_token_id
    assert AutoTokenizer.from_pretrained(CACHE).get_vocab() == tokenizer.get_vocab()
    for text in ("é \t\n x  y", '<tool_call>{"name": "bash"}</tool_call><|im_end|>\n'):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    conversations = list(teacher.episodes(1, 6, 0.5, 60))
    for conversation, row in zip(conversations, teacher.render(conversations, tokenizer), strict=True):
        said = [i for i, m in zip(row.ids, row.mask, strict=True) if m]
        replies = sum(message["role"] == "assistant" for message in conversation)
        assert said.count(tokenizer.eos_token_id) == replies and row.mask[-1] and row.ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(said, skip_special_tokens=False).endswith("Done<|im_end|>")
