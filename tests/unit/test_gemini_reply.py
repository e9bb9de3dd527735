"""Chat replies in Gemini's form: whole, streamed in whatever pieces, read by the published types."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.serve_proxy.dialects.base import Inner
from forge_ray.serve_proxy.dialects.gemini import Gemini, GeminiReply
from forge_ray.serve_proxy.dialects.gemini_contents import read_signature
from forge_ray.serve_proxy.dialects.gemini_reply import response
from forge_ray.serve_proxy.dialects.gemini_send import Stream, Whole

USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "completion_tokens_details": {"reasoning_tokens": 3},
    "prompt_tokens_details": {"cached_tokens": 8},
}


def whole(message: dict[str, Any], finish: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "c1", "model": "policy", "choices": [choice], "usage": USAGE, **more}


def tool(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"index": number, "id": f"t{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def parts(made: dict[str, Any]) -> list[dict[str, Any]]:
    types.GenerateContentResponse.model_validate_json(json.dumps(made))
    return made["candidates"][0]["content"]["parts"]


def test_a_whole_reply() -> None:
    made = response(
        whole({"reasoning": "hm", "content": "I do it.", "tool_calls": [tool("f", '{"b": 1, "a": "é"}'), tool("g", "", 1)]}), thoughts=True
    )
    thought, text, first, second = parts(made)
    signature = text.pop("thoughtSignature")
    assert read_signature(signature) == "hm" and first.pop("thoughtSignature") == signature
    assert (thought, text) == ({"text": "hm", "thought": True}, {"text": "I do it."})
    assert (first, second) == (
        {"functionCall": {"id": "t0", "name": "f", "args": {"b": 1, "a": "é"}}},
        {"functionCall": {"id": "t1", "name": "g", "args": {}}},
    )
    assert list(first["functionCall"]["args"]) == ["b", "a"]
    assert made["candidates"][0]["finishReason"] == "STOP" and made["candidates"][0]["content"]["role"] == "model"
    assert (made["modelVersion"], made["responseId"]) == ("policy", "c1")
    assert made["usageMetadata"] == {
        "promptTokenCount": 11,
        "candidatesTokenCount": 4,
        "thoughtsTokenCount": 3,
        "totalTokenCount": 18,
        "cachedContentTokenCount": 8,
    }
    parsed = types.GenerateContentResponse.model_validate_json(json.dumps(made))
    assert parsed.text == "I do it." and [call.name for call in parsed.function_calls or []] == ["f", "g"]


def test_thoughts_can_be_left_out() -> None:
    (text,) = parts(response(whole({"reasoning": "hm", "content": "yes"}), thoughts=False))
    assert text["text"] == "yes" and read_signature(text["thoughtSignature"]) == "hm"


@pytest.mark.parametrize(
    ("message", "finish", "reason"),
    [
        ({"content": "x"}, "stop", "STOP"),
        ({"content": "x"}, "length", "MAX_TOKENS"),
        ({"content": "x"}, "content_filter", "SAFETY"),
        ({"content": "x"}, "abort", "OTHER"),
        ({"content": None}, "stop", "STOP"),
        ({"tool_calls": [tool("f", '{"a": ')]}, "tool_calls", "MALFORMED_FUNCTION_CALL"),
        ({"tool_calls": [tool("f", "[1]")]}, "tool_calls", "MALFORMED_FUNCTION_CALL"),
        ({"tool_calls": [tool("f", '{"a": ')]}, "length", "MAX_TOKENS"),
    ],
)
def test_finish_reasons(message: dict[str, Any], finish: str, reason: str) -> None:
    made = response(whole(message, finish), thoughts=True)
    assert made["candidates"][0]["finishReason"] == reason
    assert not any("functionCall" in part for part in parts(made)) and parts(made)


class Client:
    """What a client receives."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream"), (b"x-y", b"z")]}


def sse(*chunks: Any) -> bytes:
    return b"".join(b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n" for chunk in chunks)


def delta(finish: str | None = None, **message: Any) -> dict[str, Any]:
    return {"id": "c1", "model": "policy", "choices": [{"index": 0, "delta": message, "finish_reason": finish}]}


END = ({"id": "c1", "model": "policy", "choices": [], "usage": USAGE}, b"[DONE]")


async def streamed(data: bytes, cuts: list[int], *, as_sse: bool = True, thoughts: bool = True) -> Client:
    """The stream `data`, cut at the offsets `cuts`, as the client gets it."""
    client = Client()
    send = Stream(client.send, sse=as_sse, thoughts=thoughts)
    await send(dict(START))
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        await send({"type": "http.response.body", "body": data[start:end], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return client


def received(client: Client) -> list[dict[str, Any]]:
    if client.headers[b"content-type"].startswith(b"text/event-stream"):
        return [json.loads(line[6:]) for line in client.body.split(b"\n\n") if line]
    return json.loads(client.body)


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts of all chunks, pieces of a text put together and signatures apart, as a client puts them."""
    found: list[dict[str, Any]] = []
    for chunk in chunks:
        for part in parts(chunk):
            part = {key: value for key, value in part.items() if key != "thoughtSignature"}
            if found and "text" in part and "text" in found[-1] and part.get("thought") == found[-1].get("thought"):
                found[-1]["text"] += part["text"]
            elif part != {"text": ""}:
                found.append(part)
    return found


LONG = (
    delta(role="assistant", content=""),
    delta(reasoning="h"),
    delta(reasoning="m"),
    delta(content="I do"),
    delta(content=" it ☕."),
    delta(tool_calls=[tool("f", "")]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a": "}'}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '{", "b": 2}'}}]),
    delta(tool_calls=[tool("g", "{}", 1)]),
    delta("tool_calls"),
    *END,
)


@given(st.lists(st.integers(min_value=0, max_value=10**6), max_size=8), st.booleans())
async def test_a_stream_is_the_reply_in_pieces(cuts: list[int], as_sse: bool) -> None:
    client = await streamed(sse(*LONG), cuts, as_sse=as_sse)
    chunks = received(client)
    calls = [tool("f", '{"a": "}{", "b": 2}'), tool("g", "{}", 1)]
    unary = response(whole({"reasoning": "hm", "content": "I do it ☕.", "tool_calls": calls}), thoughts=True)
    assert joined(chunks) == joined([unary])
    assert [chunk["candidates"][0].get("finishReason") for chunk in chunks] == [None] * (len(chunks) - 1) + ["STOP"]
    assert [chunk.get("usageMetadata") for chunk in chunks] == [None] * (len(chunks) - 1) + [unary["usageMetadata"]]
    assert client.headers[b"x-y"] == b"z" and b"content-length" not in client.headers
    reply = GeminiReply(streamed=as_sse)
    for message in client.messages[1:]:
        reply.feed(message["body"], not message["more_body"])
    assert (reply.reply, reply.complete, reply.usage) == ("tool_calls", True, unary["usageMetadata"])


async def test_pieces_are_passed_on_as_they_come() -> None:
    client = Client()
    send = Stream(client.send, sse=True, thoughts=True)
    await send(dict(START))
    seen = []
    for chunk in LONG:
        before = client.body
        await send({"type": "http.response.body", "body": sse(chunk), "more_body": True})
        seen.append([part for line in client.body[len(before) :].split(b"\n\n") if line for part in parts(json.loads(line[6:]))])
    said = [[("functionCall" in part and part["functionCall"]["name"]) or part["text"] for part in piece] for piece in seen]
    # The first call is whole when the second begins, the second at the end, which waits for the usage behind it.
    assert said == [[], ["h"], ["m"], ["I do"], [" it ☕."], [], [], [], ["f"], [], ["g"], []]
    assert seen[3][0]["thoughtSignature"] == seen[8][0]["thoughtSignature"] and "thoughtSignature" not in seen[4][0] | seen[10][0]


async def test_text_after_a_call_stays_behind_it() -> None:
    data = sse(delta(tool_calls=[tool("f", "{}")]), delta(content="done"), delta("tool_calls"), *END)
    assert joined(received(await streamed(data, []))) == [{"functionCall": {"id": "t0", "name": "f", "args": {}}}, {"text": "done"}]


@pytest.mark.parametrize("as_sse", [True, False])
async def test_a_stream_that_breaks_is_never_whole(as_sse: bool) -> None:
    broken = sse(delta(content="a"), {"error": {"message": "the engine is gone", "type": "x", "code": 500}}, b"[DONE]")
    for data in (broken, sse(delta(content="a")), sse(delta(content="a"), b"[DONE]")):
        client = await streamed(data, [], as_sse=as_sse)
        reply = GeminiReply(streamed=as_sse)
        reply.feed(client.body, True)
        assert not reply.complete and reply.reply is None
    error = received(await streamed(broken, [], as_sse=as_sse))[-1]["error"]
    assert error == {"code": 500, "message": "the engine is gone", "status": "INTERNAL"}


async def test_a_reply_without_usage_or_content_ends_all_the_same() -> None:
    (chunk,) = received(await streamed(sse(delta(role="assistant", content=""), delta("stop"), b"[DONE]"), []))
    assert parts(chunk) == [{"text": ""}] and chunk["candidates"][0]["finishReason"] == "STOP"
    assert (await streamed(b"", [], as_sse=False)).body == b"[]"


async def test_errors_of_the_app_pass_untouched() -> None:
    for make in (lambda send: Whole(send, lambda body: {}), lambda send: Stream(send, sse=True, thoughts=True)):
        client = Client()
        send = make(client.send)
        messages = [{"type": "http.response.start", "status": 400, "headers": []}, {"type": "http.response.body", "body": b"{}"}]
        for message in messages:
            await send(message)
        assert client.messages == messages


async def test_whole_replies_and_counts() -> None:
    inner = Gemini().translate({"contents": [{"parts": [{"text": "hi"}]}]}, "/v1/models/policy:countTokens", "")
    assert isinstance(inner, Inner) and inner.path == "/tokenize" and inner.body["messages"]
    client = Client()
    send = inner.wrap(client.send)
    await send({**START, "headers": [(b"content-length", b"99")]})
    await send({"type": "http.response.body", "body": b'{"count": 3, "tokens"', "more_body": True})
    await send({"type": "http.response.body", "body": b": [1, 2, 3]}", "more_body": False})
    assert types.CountTokensResponse.model_validate_json(client.body).total_tokens == 3
    assert client.headers[b"content-length"] == str(len(client.body)).encode()


async def test_what_is_said_to_a_client_that_has_left_is_no_reply() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    made = Whole(send, lambda body: response(body, thoughts=True))
    await made({"type": "http.response.start", "status": 200, "headers": []})
    await made({"type": "http.response.body", "body": b"null", "more_body": False})
    assert sent[-1]["body"] == b"null"
