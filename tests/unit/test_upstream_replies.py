"""Replies of other models, put together from what their servers send, in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge_ray.serve_proxy.upstream_replies import LEAST, READERS, UpstreamReply
from forge_ray.serve_proxy.upstream_routes import Target
from tests.unit.upstream_app import config_of, sse

CALLS = [{"id": "c1", "name": "look", "arguments": '{"a": 1}'}]


def read(dialect: str, pieces: list[bytes], *, streamed: bool = True) -> UpstreamReply:
    reply = READERS[dialect](streamed)
    for piece in pieces:
        reply.feed(piece)
    reply.close()
    return reply


def whole(dialect: str, body: Any) -> UpstreamReply:
    content = json.dumps(body).encode()
    return read(dialect, [content[:7], content[7:]], streamed=False)


OUTPUT = [
    {"type": "reasoning", "summary": [{"text": "brief"}], "content": [{"type": "reasoning_text", "text": "I see."}]},
    {"type": "message", "content": [{"type": "output_text", "text": "Yes", "logprobs": [{"token": "Yes", "logprob": -0.1}]}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'},
]
RESPONSE = {"status": "completed", "output": OUTPUT, "usage": {"total_tokens": 3}}


def test_responses() -> None:
    for reply in (
        whole("responses", RESPONSE),
        read(
            "responses",
            sse({"type": "response.output_text.delta", "delta": "Ye"}, {"type": "response.completed", "response": RESPONSE}),
        ),
    ):
        assert reply.ended and not reply.cut and reply.usage == {"total_tokens": 3}
        assert reply.first.reply() == {"text": "Yes", "reasoning": "I see.", "tool_calls": CALLS, "finish_reason": "stop"}
        assert reply.first.scores() == {"tokens": ["Yes"], "logprobs": [-0.1]}
    short = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": []}
    assert whole("responses", short).cut


def test_log_probabilities_of_a_stream_are_kept_where_its_last_event_has_none() -> None:
    scored = {"type": "response.output_text.delta", "delta": "Yes", "logprobs": [{"token": "Yes", "logprob": -0.2}]}
    bare = {"status": "completed", "output": [{"type": "message", "content": [{"text": "Yes"}]}]}
    reply = read("responses", sse(scored, {"type": "response.completed", "response": bare}))
    assert (reply.first.text, reply.first.scores()) == ("Yes", {"tokens": ["Yes"], "logprobs": [-0.2]})
    cut = read("responses", sse(scored))
    assert (cut.ended, cut.first.text) == (False, "Yes")


def test_messages() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 7}}}
    tool = {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "c1", "name": "look", "input": {}}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "I see."}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Yes"}},
        tool,
        *(
            {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": part}}
            for part in ('{"a"', ": 1}")
        ),
    ]
    end = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 5}}
    reply = read("messages", sse(start, *deltas, end, {"type": "message_stop"}))
    assert reply.ended and reply.usage == {"input_tokens": 7, "output_tokens": 5}
    assert reply.first.reply() == {"text": "Yes", "reasoning": "I see.", "tool_calls": CALLS, "finish_reason": "tool_use"}
    assert not read("messages", sse(start, *deltas, end)).ended
    blocks = [{"type": "text", "text": "Yes"}, {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}}]
    unary = whole("messages", {"content": blocks, "stop_reason": "max_tokens", "usage": {}})
    assert unary.ended and unary.cut and unary.first.reply()["tool_calls"] == CALLS


def test_completions_and_several_choices() -> None:
    scores = {"tokens": ["a", "b"], "token_logprobs": [-0.5, None], "top_logprobs": [{"a": -0.5, "c": -1.5}, None]}
    choices = [
        {"index": 1, "text": "zz", "finish_reason": "length"},
        {"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": scores},
    ]
    reply = whole("completions", {"choices": choices})
    assert (reply.first.text, reply.said[1].text, reply.cut) == ("ab", "zz", False)
    assert reply.first.scores() == {"tokens": ["a", "b"], "logprobs": [-0.5, LEAST], "top": [{"a": -0.5, "c": -1.5}]}


def test_half_characters_keep_their_bytes_and_infinity_becomes_a_number() -> None:
    entries = [{"token": "�", "logprob": float("-inf"), "bytes": [0xC3]}, {"token": "x", "logprob": -1, "bytes": [120]}]
    reply = whole(
        "chat", {"choices": [{"index": 0, "message": {"content": "x"}, "logprobs": {"content": entries}, "finish_reason": "stop"}]}
    )
    assert reply.first.scores() == {"tokens": ["�", "x"], "logprobs": [LEAST, -1.0], "bytes": {"0": [0xC3]}}


@pytest.mark.parametrize("dialect", list(READERS))
def test_what_is_no_reply_is_left_out(dialect: str) -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"choices": [1]},
        {"choices": [{"index": [], "delta": {"tool_calls": [3]}}]},
        {"type": "message_start"},
    ]
    reply = read(dialect, [b": comment\n\ndata: [1]\n\ndata: {\n\n", *sse(*odd), b"data: [DONE]\n\n"])
    assert not reply.ended and reply.first.reply()["text"] == ""
    assert not whole(dialect, [1]).ended and not read(dialect, [b"<html>"], streamed=False).ended


def ask(dialect: str, body: dict[str, Any], **settings: Any) -> dict[str, Any]:
    target = Target("t", config_of({"t": {"url": "http://x/v1/", **settings}}).proxy.upstreams["t"])
    return json.loads(target.body(dialect, body, json.dumps(body).encode()))


def test_log_probabilities_are_asked_for_in_the_dialects_words() -> None:
    assert ask("chat", {}, top_logprobs=3) == {"logprobs": True, "top_logprobs": 3}
    assert ask("chat", {"logprobs": True, "top_logprobs": 5}, top_logprobs=3) == {"logprobs": True, "top_logprobs": 5}
    assert ask("chat", {"logprobs": False}, top_logprobs=3) == {"logprobs": False}
    assert ask("completions", {}) == {"logprobs": 0} and ask("completions", {"logprobs": 4}) == {"logprobs": 4}
    assert ask("responses", {"include": ["x"]}) == {"include": ["x", "message.output_text.logprobs"]}
    assert ask("messages", {"max_tokens": 3}) == {"max_tokens": 3} and ask("chat", {}, logprobs=False) == {}
