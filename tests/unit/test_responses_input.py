"""Items of the responses dialect as clients return them, in the form in which vLLM's server takes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from forge_ray.serve_proxy.dialects.responses import Responses
from forge_ray.serve_proxy.dialects.responses_input import adapt, refuse

TEXT = {"type": "output_text", "text": "one", "annotations": []}
ASSISTANT = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [TEXT]}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1 }'}


@pytest.mark.parametrize(
    "item",
    [
        USER,
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        ASSISTANT,
        {"role": "assistant", "content": "one"},
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "out"}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": None},
    ],
)
def test_what_vllm_takes_stays_as_it_is(item: dict[str, Any]) -> None:
    body = {"input": [copy.deepcopy(item)], "tools": [{"type": "function", "name": "f", "parameters": {}}]}
    before = copy.deepcopy(body)
    assert refuse(body) is None and not adapt(body) and body == before


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "assistant", "content": [{"type": "output_text", "text": "one"}]}, "one"),
        ({**ASSISTANT, "id": None, "status": None}, "one"),
        ({"role": "assistant", "content": [TEXT, {"type": "output_text", "text": "two"}]}, "one\ntwo"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"role": "assistant", "content": [{"type": "input_text", "text": "mine"}]}, "mine"),
    ],
)
def test_assistant_items_are_completed(item: dict[str, Any], expected: str) -> None:
    body = {"input": [USER, item]}
    assert adapt(body)
    new = body["input"][1]
    assert new["type"] == "message" and None not in new.values()
    assert [(part["type"], part["text"]) for part in new["content"]] == [("output_text", expected)]


@pytest.mark.parametrize("content", [[], None, ""])
@pytest.mark.parametrize("kind", [{}, {"type": "message"}])
def test_an_empty_assistant_item_adds_nothing(kind: dict[str, Any], content: Any) -> None:
    body = {"input": [USER, {"role": "assistant", "content": content, **kind}]}
    assert adapt(body) and body["input"] == [USER]


def test_reasoning_of_another_server() -> None:
    parts = [{"type": "summary_text", "text": "I think"}, {"type": "summary_text", "text": "therefore"}]
    body = {
        "input": [{"type": "reasoning", "id": "r", "summary": parts, "encrypted_content": "gAAA"}, {"type": "reasoning", "content": None}]
    }
    assert adapt(body)
    first, second = body["input"]
    assert "encrypted_content" not in first and [part["text"] for part in first["summary"]] == ["I think\ntherefore"]
    assert second["summary"] == []


def test_wrong_shapes_are_left_to_the_validation() -> None:
    dialect = Responses()
    for body in (
        {"input": 5},
        {"input": "text", "tools": 5},
        {"input": [USER], "tools": ["x"]},
        {"include": "x"},
        {"tools": {"type": "custom"}},
    ):
        assert dialect.refuse(body) is None
        dialect.unheeded(body, forced=True)
        dialect.adapt(body)
