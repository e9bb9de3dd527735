"""Requests of the Gemini dialect become the chat requests that mean the same."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.serve_proxy.dialects.gemini import Gemini
from forge_ray.serve_proxy.dialects.gemini_contents import Invalid, messages, read_signature, sign
from forge_ray.serve_proxy.dialects.gemini_fields import FIELDS
from forge_ray.serve_proxy.dialects.gemini_request import chat_request
from forge_ray.serve_proxy.dialects.gemini_schema import json_schema
from forge_ray.serve_proxy.dialects.refusal import Refusal

HI: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
LS = {"type": "object", "properties": {"dir_path": {"type": "string"}}, "required": ["dir_path"]}


def chat(body: dict[str, Any]) -> dict[str, Any]:
    made = chat_request(body, "policy")
    assert not isinstance(made, Refusal), made
    return made[0]


def ignored(body: dict[str, Any]) -> list[str]:
    made = chat_request(body, "policy")
    assert not isinstance(made, Refusal), made
    return made[1]


def refused(body: dict[str, Any]) -> Refusal:
    made = chat_request(body, "policy")
    assert isinstance(made, Refusal), made
    assert made.status == 400
    return made


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
    assert chat(camel)["messages"] == [{"role": "user", "content": "hi"}]


CALL = {"functionCall": {"id": "a1", "name": "sh", "args": {"b": 1, "a": "é"}}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [{"id": "a1", "type": "function"}]}


def test_a_turn_with_thoughts_text_and_calls() -> None:
    parts = [{"text": "hm ", "thought": True}, {"text": "so", "thought": True}, {"text": "I do"}, {"text": " it."}, CALL]
    (turn,) = messages(None, [{"role": "model", "parts": parts}])
    function = {"name": "sh", "arguments": '{"b": 1, "a": "é"}'}  # in the order in which the model said them
    assert turn == {
        "role": "assistant",
        "content": "I do it.",
        "reasoning_content": "hm so",
        "tool_calls": [{"id": "a1", "type": "function", "function": function}],
    }


def test_pieces_of_a_stream_that_come_back_apart_are_one_turn() -> None:
    signed = sign("hm so")
    pieces: list[Any] = [
        [{"text": "hm ", "thought": True}],
        [{"text": "so", "thought": True}],
        [{"text": "I do", "thoughtSignature": signed}],
        [{"text": " it."}],
        [],
        [{**CALL, "thoughtSignature": signed}],
        [{"text": ""}],
    ]
    apart = messages(None, [{"role": "model", "parts": parts} for parts in pieces])
    assert apart == messages(None, [{"role": "model", "parts": [part for parts in pieces for part in parts]}])
    assert apart[0]["reasoning_content"] == "hm so" and apart[0]["content"] == "I do it." and len(apart) == 1


def test_thoughts_come_back_in_the_signature() -> None:
    parts = [{"text": "I do it."}, {**CALL, "thoughtSignature": sign("hm")}]
    assert messages(None, [{"role": "model", "parts": parts}])[0]["reasoning_content"] == "hm"
    for foreign in ("skip_thought_signature_validator", "c2tpcA==", "", "%%", base64.b64encode(b"thoughts:x").decode()):
        assert "reasoning_content" not in messages(None, [{"role": "model", "parts": [{**CALL, "thoughtSignature": foreign}]}])[0]


@given(st.text())
def test_signatures(thoughts: str) -> None:
    assert read_signature(sign(thoughts)) == thoughts


def response(name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": value, **more}}


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **more}}


def ids(history: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Call ids as said, and as answered."""
    found = messages(None, history)
    said = [made["id"] for message in found for made in message.get("tool_calls", [])]
    return said, [message["tool_call_id"] for message in found if message["role"] == "tool"]


def test_responses_are_matched_to_calls() -> None:
    model, user = "model", "user"
    with_ids = [
        {"role": model, "parts": [call("f", id="1"), call("f", id="2")]},
        {"role": user, "parts": [response("f", {"output": "x"}, id="2"), response("f", {"output": "y"}, id="1")]},
    ]
    assert ids(with_ids) == (["1", "2"], ["2", "1"])
    by_name = [
        {"role": model, "parts": [call("f"), call("g"), call("f")]},
        {"role": "function", "parts": [response("g", {}), response("f", {}, id="f-1764-ab"), response("f", {})]},
    ]
    said, answered = ids(by_name)
    assert len(set(said)) == 3 and answered == [said[1], said[0], said[2]]
    # An id wins over the order, also where the response that has one comes later.
    mixed = [
        {"role": model, "parts": [call("f", id="1"), call("f", id="2")]},
        {"role": "tool", "parts": [response("f", {}), response("f", {}, id="1")]},
    ]
    assert ids(mixed) == (["1", "2"], ["2", "1"])
    # A call that was never answered does not take the answer of a later one; ids stay when the history grows.
    later = [*by_name[:1], {"role": user, "parts": [{"text": "stop"}]}, *by_name]
    said_later, answered_later = ids(later)
    assert said_later[:3] == said and answered_later == [said_later[4], said_later[3], said_later[5]]
    # The call was dropped by a compaction.
    assert ids([{"role": user, "parts": [response("f", {}, id="9")]}]) == ([], ["9"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"result": 5}, "5"),
        ({"error": "no file"}, '{"error": "no file"}'),
        ({"output": "x", "code": 1}, '{"output": "x", "code": 1}'),
        ({}, "{}"),
    ],
)
def test_what_a_tool_said(value: Any, text: str) -> None:
    assert messages(None, [{"role": "user", "parts": [response("f", value)]}])[0]["content"] == text


@given(st.binary(max_size=64))
def test_images(data: bytes) -> None:
    for encoded in (base64.b64encode(data), base64.urlsafe_b64encode(data), base64.urlsafe_b64encode(data).rstrip(b"=")):
        image = {"inlineData": {"mimeType": "image/png", "data": encoded.decode()}}
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}
        (user,) = messages(None, [{"role": "user", "parts": [{"text": "see"}, image]}])
        assert user["content"] == [{"type": "text", "text": "see"}, url]
        (tool,) = messages(None, [{"role": "user", "parts": [response("shot", {"output": "ok"}, parts=[image])]}])
        assert tool["content"] == [{"type": "text", "text": "ok"}, url]


TOOLS = [{"functionDeclarations": [{"name": name} for name in ("f", "g", "h")]}]


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


def test_the_lists() -> None:
    config = {
        "mediaResolution": "MEDIA_RESOLUTION_LOW",
        "thinkingConfig": {"thinkingLevel": "HIGH", "includeThoughts": False, "aNewOne": 1},
        "someNewField": 1,
    }
    body = {
        **HI,
        "safetySettings": [{"category": "HARM_NEW", "threshold": "OFF"}],
        "labels": {"a": "b"},
        "generationConfig": config,
        "newer": 1,
    }
    assert sorted(ignored(body)) == [
        "generationConfig.mediaResolution",
        "generationConfig.someNewField",
        "generationConfig.thinkingConfig.thinkingLevel",
        "labels",
        "newer",
        "safetySettings",
    ]
    part = {"contents": [{"parts": [{"text": "a", "odd": 1}, {"text": "b", "odd": 2}]}]}
    assert ignored(part) == ["contents.parts.odd"]
    assert Gemini().unheeded(chat({**HI, "generationConfig": {"topP": 0.5, "seed": 3, "stopSequences": ["x"]}}), forced=True) == [
        "generationConfig.topP",
        "generationConfig.seed",
    ]


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


def sample(name: str) -> dict[str, Any]:
    """A request that has the listed field `name`."""
    if name.startswith("tools: "):
        return {**HI, "tools": [{name[7:]: {}}]}
    if name.startswith("tools.functionDeclarations."):
        return {**HI, "tools": [{"functionDeclarations": [{"name": "f", name.rpartition(".")[2]: VALUES.get(name, {"type": "STRING"})}]}]}
    if name.startswith("contents.parts."):
        return {"contents": [{"parts": [{"text": "hi"}, {"text": "x", name.rpartition(".")[2]: VALUES.get(name, {})}]}]}
    *outer, last = name.split(".")
    value: Any = {last: VALUES.get(name, {"a": "b"})}
    for key in reversed(outer):
        value = {key: value}
    return {**HI, **value}


VALUES: dict[str, Any] = {
    "tools.functionDeclarations.behavior": "BLOCKING",
    "contents.parts.mediaResolution": {"level": "MEDIA_RESOLUTION_LOW"},
    "contents.parts.partMetadata": {"a": 1},
    "toolConfig.retrievalConfig": {"languageCode": "en"},
    "toolConfig.includeServerSideToolInvocations": True,
    "generationConfig.thinkingConfig.thinkingBudget": 5,
    "generationConfig.thinkingConfig.thinkingLevel": "LOW",
    "generationConfig.thinkingConfig.includeThoughts": False,
    "generationConfig.mediaResolution": "MEDIA_RESOLUTION_LOW",
    "generationConfig.speechConfig": {"languageCode": "en"},
    "generationConfig.imageConfig": {"aspectRatio": "1:1"},
    "generationConfig.audioTimestamp": True,
    "generationConfig.enableAffectiveDialog": True,
    "generationConfig.enableEnhancedCivicAnswers": True,
    "generationConfig.routingConfig": {"autoMode": {}},
    "generationConfig.modelSelectionConfig": {"featureSelectionPreference": "BALANCED"},
    "generationConfig.maxOutputTokens": 5,
    "generationConfig.stopSequences": ["x"],
    "generationConfig.responseMimeType": "application/json",
    "generationConfig.responseSchema": {"type": "STRING"},
    "generationConfig.responseJsonSchema": {"type": "string"},
    "generationConfig.responseModalities": ["AUDIO"],
    "generationConfig.candidateCount": 2,
    "generationConfig.responseLogprobs": True,
    "generationConfig.logprobs": 1,
    "toolConfig.functionCallingConfig": {"mode": "NONE"},
    "toolConfig": {},
    "tools": TOOLS,
    "contents": HI["contents"],
    "systemInstruction": "x",
    "generationConfig": {},
    "cachedContent": "x",
    "model": "models/x",
    **{f"generationConfig.{name}": 1 for name in ("temperature", "topP", "topK", "presencePenalty", "frequencyPenalty", "seed")},
}


@pytest.mark.parametrize("name", [*FIELDS.ignored, *FIELDS.sampling])
def test_each_ignored_field_is_named(name: str) -> None:
    made = chat_request(sample(name), "policy")
    assert not isinstance(made, Refusal), made
    assert [*made[1], *Gemini().unheeded(made[0], forced=True)] == [name]
    assert Gemini().unheeded(made[0], forced=False) == []


@pytest.mark.parametrize("name", [name for name in FIELDS.honoured if name != "generateContentRequest"])
def test_no_honoured_field_is_named(name: str) -> None:
    assert ignored(sample(name)) == []


@pytest.mark.parametrize("name", list(FIELDS.refused))
def test_each_refused_field_is_named(name: str) -> None:
    assert refused(sample(name)).param in (name, f"contents[0].parts[1].{name.rpartition('.')[2]}")


def test_no_field_is_in_two_lists() -> None:
    listed = [*FIELDS.honoured, *FIELDS.ignored, *FIELDS.sampling, *FIELDS.refused]
    assert len(listed) == len(set(listed))


SCHEMA = {
    "type": "OBJECT",
    "description": "d",
    "properties": {
        "path": {"type": "STRING", "minLength": "1", "format": "uri", "enum": ["a", "b"]},
        "lines": {"type": "ARRAY", "items": {"type": "INTEGER", "minimum": 0}, "maxItems": "3"},
        "what": {"anyOf": [{"type": "STRING"}, {"type": "BOOLEAN"}]},
    },
    "required": ["path"],
}


def test_schemas_become_what_the_library_makes_of_them() -> None:
    theirs = types.Schema.model_validate(SCHEMA).json_schema.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert json_schema(SCHEMA) == theirs


def test_schemas_keep_what_the_form_does_not_know() -> None:
    schema = {
        "type": "OBJECT",
        "$schema": "x",
        "additionalProperties": {"type": "STRING"},
        "property_ordering": ["b", "gone", "a"],
        "properties": {"a": {"type": "STRING", "nullable": True, "enum": ["x"]}, "b": {"any_of": [{"type": "NUMBER"}], "nullable": True}},
    }
    made = json_schema(schema)
    assert made == {
        "type": "object",
        "$schema": "x",
        "additionalProperties": {"type": "string"},
        "properties": {"a": {"type": ["string", "null"], "enum": ["x", None]}, "b": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
    }
    assert list(made["properties"]) == ["b", "a"]
    assert json_schema(json_schema(SCHEMA)) == json_schema(SCHEMA)


# ---- any history

_text = st.text(max_size=8)
_args = st.dictionaries(st.text(min_size=1, max_size=4), st.integers() | _text | st.lists(_text, max_size=2), max_size=3)
_name = st.sampled_from(["f", "g"])
_model = st.lists(
    st.one_of(
        st.builds(lambda text: {"text": text}, _text),
        st.builds(lambda text: {"text": text, "thought": True}, _text),
        st.builds(lambda name, args: {"functionCall": {"name": name, "args": args}}, _name, _args),
    ),
    min_size=1,
    max_size=4,
)
_user = st.lists(
    st.one_of(st.builds(lambda text: {"text": text}, _text), st.builds(lambda name, text: response(name, {"output": text}), _name, _text)),
    min_size=1,
    max_size=4,
)
_history = st.lists(
    st.one_of(
        st.builds(lambda parts: {"role": "model", "parts": parts}, _model),
        st.builds(lambda parts: {"role": "user", "parts": parts}, _user),
    ),
    max_size=6,
)


@given(_history)
def test_nothing_is_lost_and_a_longer_history_begins_alike(history: list[dict[str, Any]]) -> None:
    made = messages(None, history)
    parts = [part for content in history for part in content["parts"]]
    calls = [call for message in made for call in message.get("tool_calls", [])]
    said = [(part["functionCall"]["name"], part["functionCall"]["args"]) for part in parts if "functionCall" in part]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == said
    results = [part["functionResponse"]["response"]["output"] for part in parts if "functionResponse" in part]
    assert [message["content"] for message in made if message["role"] == "tool"] == results
    spoken = "".join(part["text"] for content in history if content["role"] == "model" for part in content["parts"] if "text" in part)
    thought = "".join(message.get("reasoning_content", "") for message in made)
    assert len("".join(message["content"] or "" for message in made if message["role"] == "assistant")) + len(thought) == len(spoken)
    answered = [message["tool_call_id"] for message in made if message["role"] == "tool"]
    assert len(set(answered)) == len(answered) and len({call["id"] for call in calls}) == len(calls)
    grown = messages(None, [*history, {"role": "user", "parts": [{"text": "go on"}]}])
    assert grown[: len(made)] == made


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
