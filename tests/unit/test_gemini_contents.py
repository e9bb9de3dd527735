"""A Gemini history becomes chat messages: turns, thoughts, calls and their answers, images; nothing is lost."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.serve_proxy.dialects.gemini_contents import messages, read_signature, sign
from tests.unit.gemini_chat import call, response

CALL = {"functionCall": {"id": "a1", "name": "sh", "args": {"b": 1, "a": "é"}}}


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
