"""The quickstart's policy: its tokenizer loses nothing, its chat template takes what servers and clients hand it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.harnesses.react_program import TOOL
from tests.quickstart import module

policy, families = module("policy"), module("families")
HEAD = "<|system|>tool bash(command)<|end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return policy.tokenizer()


def render(tokenizer, messages, *, tools=(TOOL,), generate=False) -> str:
    return tokenizer.apply_chat_template(messages, tools=list(tools), tokenize=False, add_generation_prompt=generate)


def call(arguments, content=None):
    function = {"name": "bash", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_the_tokenizer(text) -> None:
    tokenizer = policy.tokenizer()
    for whole in (text, f"<|user|>{text}<|end|><|assistant|>{policy.CALL[0]}{text}{policy.CALL[1]}<|end|>"):
        assert tokenizer.decode(tokenizer.encode(whole, add_special_tokens=False), skip_special_tokens=False) == whole


def test_a_name_is_two_tokens_wherever_it_stands_and_a_tool_call_is_short(tokenizer) -> None:
    for adjective in families.ADJECTIVES:
        for noun in families.NOUNS:
            name = f"{adjective}-{noun}.txt"
            assert len(tokenizer.encode(name)) == len(tokenizer.encode(f" {name}")) == 2
    assert len(tokenizer.encode(f"{policy.CALL[0]}grep -l 123 * > big-ant.txt{policy.CALL[1]}<|end|>")) <= 14


def test_the_words_of_a_tool_call_are_no_special_tokens(tokenizer) -> None:
    text = f"{policy.CALL[0]}ls{policy.CALL[1]}"
    assert tokenizer.decode(tokenizer.encode(f"{text}<|end|>"), skip_special_tokens=True) == text


def test_arguments_may_be_an_object_or_json_text(tokenizer) -> None:
    arguments = {"command": "printf \"%s\\n\" 'é' > a"}
    expected = f'<|assistant|><tool_call>{{"name": "bash", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}</tool_call><|end|>'
    for given_arguments in (arguments, json.dumps(arguments, ensure_ascii=False)):
        assert render(tokenizer, [call(given_arguments)]) == HEAD + expected
    assert policy.CALL[0] in expected and policy.CALL[1] in expected


def test_the_history_of_an_episode(tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Write 123 to big-ant.txt"},
        call({"command": "echo 123 > big-ant.txt"}),
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]
    assert render(tokenizer, messages, generate=True) == (
        f"{HEAD}<|user|>Write 123 to big-ant.txt<|end|>"
        f"<|assistant|>{policy.CALL[0]}echo 123 > big-ant.txt{policy.CALL[1]}<|end|><|tool|><|end|><|assistant|>"
    )


def test_text_before_a_tool_call_and_several_calls_in_one_reply(tokenizer) -> None:
    message = call({"command": "ls"}, "Look: ")
    message["tool_calls"] *= 2
    one = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    assert render(tokenizer, [message]) == f"{HEAD}<|assistant|>Look: {one}{one}<|end|>"


def test_system_messages_stand_where_the_harness_puts_them(tokenizer) -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "system", "developer")]
    middle = "<|user|>u<|end|><|system|>s<|end|><|system|>d<|end|>"
    assert render(tokenizer, messages) == f"<|system|>s tool bash(command)<|end|>{middle}"
    assert render(tokenizer, messages, tools=()) == f"<|system|>s<|end|>{middle}"
    assert render(tokenizer, messages[1:2], tools=()) == "<|user|>u<|end|>"


def test_the_tools_are_the_request_s(tokenizer) -> None:
    other = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {"file": {}, "text": {}}}}}
    bare = {"type": "function", "function": {"name": "now"}}
    head = "<|system|>tool bash(command) tool edit(file, text) tool now()<|end|>"
    assert render(tokenizer, [{"role": "user", "content": "u"}], tools=(TOOL, other, bare)) == head + "<|user|>u<|end|>"


def test_the_same_model_for_the_same_seed_and_a_row_for_every_token(tmp_path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        policy.build(tmp_path / name, seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert loaded.get_vocab() == policy.tokenizer().get_vocab()
    assert model.config.vocab_size == len(loaded)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert model.generation_config.eos_token_id == loaded.eos_token_id != loaded.pad_token_id
    ids = torch.tensor([loaded.encode(f"{HEAD}<|user|>Write 123 to big-ant.txt<|end|><|assistant|>")])
    assert torch.isfinite(model(ids).logits).all()
