"""Requests of the Gemini dialect become the chat requests that mean the same, or are refused by the field at fault."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.serve_proxy.dialects.gemini_contents import Invalid
from forge_ray.serve_proxy.dialects.gemini_request import chat_request
from tests.unit.gemini_chat import HI, TOOLS, call, chat, ignored, refused, response

LS = {"type": "object", "properties": {"dir_path": {"type": "string"}}, "required": ["dir_path"]}


def test_the_first_request_of_gemini_cli() -> None:
    body = {
        "contents": [{"role": "user", "parts": [{"text": "ctx"}]}, {"role": "user", "parts": [{"text": "do"}, {"text": "it"}]}],
        "systemInstruction": {"role": "user", "parts": [{"text": "sys"}]},
        "tools": [{"functionDeclarations": [{"name": "ls", "description": "d", "parametersJsonSchema": LS}]}],
        "generationConfig": {
            "temperature": 1,
            "topP": 0.95,
            "topK": 64,
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
        },
    }
    assert chat(body) == {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "sys"},
            {"role": "user", "content": "ctx"},
            {"role": "user", "content": [{"type": "text", "text": "do"}, {"type": "text", "text": "it"}]},
        ],
        "temperature": 1,
        "top_p": 0.95,
        "top_k": 64,
        "tools": [{"type": "function", "function": {"name": "ls", "description": "d", "parameters": LS}}],
        "tool_choice": "auto",
    }
    assert ignored(body) == ["generationConfig.thinkingConfig.thinkingBudget"]


@pytest.mark.parametrize("system", ["sys", {"parts": [{"text": "sys"}]}, {"role": "system", "parts": {"text": "sys"}}, [{"text": "sys"}]])
@pytest.mark.parametrize("key", ["systemInstruction", "system_instruction"])
def test_system_instructions(system: Any, key: str) -> None:
    assert chat({**HI, key: system})["messages"][0] == {"role": "system", "content": "sys"}


def test_snake_case_single_objects_and_nulls_mean_the_same() -> None:
    camel = {
        "contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "text/plain", "data": "aGk="}}]}],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "properties": {"n": {"type": "INTEGER"}}}}]}],
        "generationConfig": {"maxOutputTokens": 9, "stopSequences": ["x"]},
    }
    snake = {
        "contents": {"parts": {"inline_data": {"mime_type": "text/plain", "data": "aGk"}}},
        "tools": {"function_declarations": {"name": "f", "parameters": {"type": "OBJECT", "properties": {"n": {"type": "INTEGER"}}}}},
        "generation_config": {"max_output_tokens": "9", "stop_sequences": ["x"], "seed": None},
        "safety_settings": None,
    }
    assert chat(camel) == chat(snake)
    made = chat(camel)
    assert made["messages"] == [{"role": "user", "content": "hi"}] and (made["max_completion_tokens"], made["stop"]) == (9, ["x"])


def calling(mode: str, *allowed: str) -> dict[str, Any]:
    config = {"mode": mode, **({"allowedFunctionNames": list(allowed)} if allowed else {})}
    return {**HI, "tools": TOOLS, "toolConfig": {"functionCallingConfig": config}}


def test_function_calling_modes() -> None:
    def names(made: dict[str, Any]) -> list[str]:
        return [tool["function"]["name"] for tool in made["tools"]]

    assert [chat(calling(mode))["tool_choice"] for mode in ("AUTO", "VALIDATED", "NONE", "ANY", "any")] == [
        "auto",
        "auto",
        "none",
        "required",
        "required",
    ]
    one = chat(calling("ANY", "g"))
    assert one["tool_choice"] == {"type": "function", "function": {"name": "g"}} and names(one) == ["f", "g", "h"]
    two = chat(calling("ANY", "g", "h"))
    assert two["tool_choice"] == "required" and names(two) == ["g", "h"]
    assert ignored(calling("AUTO", "g")) == ["toolConfig.functionCallingConfig.allowedFunctionNames"]
    assert ignored(calling("VALIDATED")) == ["toolConfig.functionCallingConfig.mode"]
    assert "allowed_function_names" in refused(calling("ANY", "nope")).message


def test_hosted_tools_are_named_and_refused_where_they_are_forced() -> None:
    hosted = [{"googleSearch": {}}, {"code_execution": {}, "urlContext": {}}, {"someNewTool": {"x": 1}}]
    body = {**HI, "tools": [*TOOLS, *hosted]}
    assert ignored(body) == ["tools: googleSearch", "tools: codeExecution", "tools: urlContext", "tools: someNewTool"]
    assert len(chat(body)["tools"]) == 3
    assert "tools" not in chat({**HI, "tools": hosted})
    forced = {**HI, "tools": hosted, "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}
    assert refused(forced).param == "toolConfig.functionCallingConfig.mode"


def test_grammars() -> None:
    schema = {"type": "OBJECT", "properties": {"score": {"type": "INTEGER", "nullable": True}}}
    made = {"type": "object", "properties": {"score": {"type": ["integer", "null"]}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "response", "schema": made, "strict": True}}
    mime = {"responseMimeType": "application/json"}
    assert chat({**HI, "generationConfig": {**mime, "responseSchema": schema}})["response_format"] == wanted
    assert chat({**HI, "generationConfig": {**mime, "responseJsonSchema": made}})["response_format"] == wanted
    assert chat({**HI, "generationConfig": mime})["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat({**HI, "generationConfig": {"responseMimeType": "text/plain"}})
    enum = {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a", "b"]}}
    assert chat({**HI, "generationConfig": enum})["structured_outputs"] == {"choice": ["a", "b"]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**HI, "cachedContent": "cachedContents/1"}, "cachedContent"),
        ({**HI, "generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({**HI, "generationConfig": {"responseLogprobs": True}}, "generationConfig.responseLogprobs"),
        ({**HI, "generationConfig": {"logprobs": 0}}, "generationConfig.logprobs"),
        ({**HI, "generationConfig": {"responseModalities": ["TEXT", "IMAGE"]}}, "generationConfig.responseModalities"),
        ({**HI, "generationConfig": {"responseMimeType": "image/png"}}, "generationConfig.responseMimeType"),
        ({**HI, "generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({**HI, "generationConfig": {"maxOutputTokens": "many"}}, "generationConfig.maxOutputTokens"),
        ({"contents": []}, "contents"),
        ({}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": [{"role": "assistant", "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "gs://x"}}]}]}, "contents[0].parts[0].fileData"),
        ({"contents": [{"parts": [{"text": "a"}, {"executableCode": {"code": "x"}}]}]}, "contents[0].parts[1].executableCode"),
        ({"contents": [{"role": "model", "parts": [response("f", {})]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "user", "parts": [call("f")]}]}, "contents[0].parts[0]"),
        (
            {"contents": [{"parts": [{"inlineData": {"mimeType": "audio/wav", "data": "aGk="}}]}]},
            "contents[0].parts[0].inlineData.mimeType",
        ),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "a"}}]}]}, "contents[0].parts[0].inlineData.data"),
        ({"contents": [{"parts": [{"text": 5}]}]}, "contents[0].parts[0].text"),
        ({**HI, "systemInstruction": {"parts": [{"fileData": {"fileUri": "gs://x"}}]}}, "systemInstruction.parts[0]"),
    ],
)
def test_refusals(body: dict[str, Any], param: str) -> None:
    assert refused(body).param == param


def test_one_candidate_is_what_there_is() -> None:
    assert chat({**HI, "generationConfig": {"candidateCount": 1, "responseModalities": ["TEXT"]}})["messages"]


_text = st.text(max_size=8)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | _text,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "contents",
                        "parts",
                        "text",
                        "role",
                        "tools",
                        "functionDeclarations",
                        "generationConfig",
                        "toolConfig",
                        "functionCall",
                        "functionResponse",
                        "inlineData",
                        "name",
                        "args",
                        "systemInstruction",
                        "functionCallingConfig",
                        "mode",
                        "response",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_request_breaks_the_translation(value: Any) -> None:
    if isinstance(value, dict):
        chat_request(value, "policy")
    try:
        chat_request({**HI, "tools": value, "systemInstruction": value}, "policy")
        chat_request({"contents": value}, "policy")
    except Invalid as error:  # never: it is answered as a refusal
        raise AssertionError from error
