"""The edge over a small app: who may call what, in which words it is refused, and what is written down."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from forge_ray.config import Limits
from tests.unit.edge_app import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, USER, WINDOW, Rig, client, post


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.log.close()


def openai_client(rig: Rig, token: str | None = None) -> openai.AsyncOpenAI:
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(rig.edge))
    return openai.AsyncOpenAI(base_url=f"http://proxy/s/{token or rig.token()}/v1", api_key="x", http_client=http, max_retries=0)


def anthropic_client(rig: Rig, token: str | None = None) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(rig.edge))
    return anthropic.AsyncAnthropic(base_url=f"http://proxy/s/{token or rig.token()}", api_key="x", http_client=http, max_retries=0)


async def ask(rig: Rig, path: str, token: Any = None, **extra: Any) -> Any:
    """The same request through the dialect's official client."""
    stream = extra.pop("stream", False)
    if path == MESSAGES:
        asked: dict[str, Any] = {"model": "policy", "max_tokens": extra.pop("max_tokens", 16), "messages": extra.pop("messages", USER)}
        return await anthropic_client(rig, token).messages.create(**asked, stream=stream, extra_body=extra)
    api = openai_client(rig, token)
    if path == RESPONSES:
        return await api.responses.create(model="policy", input="hi", stream=stream, extra_body=extra)
    if path == COMPLETIONS:
        return await api.completions.create(model="policy", prompt="hi", stream=stream, extra_body=extra)
    return await api.chat.completions.create(model="policy", messages=USER, stream=stream, extra_body=extra)


# --- who is calling


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "x-goog-api-key"])
async def test_a_session_comes_by_prefix_or_by_key(rig: Rig, header: str) -> None:
    token = rig.token("by-key", "eval")
    key = f"Bearer {token}" if header == "Authorization" else token
    async with client(rig) as http:
        assert (await http.post(CHAT, json=BODIES[CHAT], headers={header: key})).status_code == 200
        assert (await http.post(f"/s/{rig.token('by-prefix')}{CHAT}", json=BODIES[CHAT], headers={header: "dummy"})).status_code == 200
    assert [(context.session, context.purpose) for context in rig.contexts] == [("by-key", "eval"), ("by-prefix", "train")]
    assert rig.contexts[0].path == CHAT and rig.contexts[0].dialect == "chat"


@pytest.mark.parametrize("path", list(BODIES))
async def test_unknown_callers_are_refused_in_the_dialect(rig: Rig, path: str) -> None:
    errors: dict[str, Any] = {MESSAGES: anthropic.AuthenticationError}
    with pytest.raises(errors.get(path, openai.AuthenticationError)):
        await ask(rig, path, token="nonsense")
    forged = rig.token()[:-1] + ("a" if rig.token()[-1] != "a" else "b")
    with pytest.raises(errors.get(path, openai.AuthenticationError)):
        await ask(rig, path, token=forged)
    async with client(rig) as http:
        assert (await http.post(path, json=BODIES[path])).status_code == 401
        assert (await http.post(path, json=BODIES[path], headers={"x-api-key": "sk-1"})).status_code == 401
    assert rig.seen == [] and rig.events() == []


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_closed_session_is_refused(rig: Rig, path: str) -> None:
    rig.index.close("g1-0.0")
    error: Any = anthropic.PermissionDeniedError if path == MESSAGES else openai.PermissionDeniedError
    with pytest.raises(error, match="closed"):
        await ask(rig, path)
    assert (await post(rig, path, rig.token("another"))).status_code == 200


async def test_one_session_cannot_write_into_another(rig: Rig) -> None:
    await asyncio.gather(*(post(rig, token=rig.token(f"s{i}"), ids=[i, i]) for i in range(20)))
    reader = rig.read()
    for i in range(20):
        (call,) = reader.session(f"s{i}")
        assert call.prompt_ids == [i, i] and call.delivered


# --- what is open


@pytest.mark.parametrize(
    "path", ["/tokenize", "/v1/embeddings", "/load", "/metrics", "/v1/load_lora_adapter", "/inference/v1/generate", "/docs"]
)
async def test_other_routes_are_closed(rig: Rig, path: str) -> None:
    async with client(rig) as http:
        for prefix in (f"/s/{rig.token()}", ""):
            for method in ("GET", "POST"):
                answer = await http.request(method, prefix + path, json={}, headers={"x-api-key": rig.token()})
                assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"
        assert (await http.get(f"/s/{rig.token()}/v1/messages/batches")).json()["error"]["type"] == "not_found_error"
        assert (await http.get(f"/s/{rig.token()}{CHAT}")).status_code == 405
    assert rig.seen == []


async def test_probes_answer_and_are_no_calls(rig: Rig) -> None:
    async with client(rig) as http:
        for prefix in (f"/s/{rig.token()}", ""):
            for path in ("/models", "/v1/models", "/api/v1/models"):
                (model,) = (await http.get(prefix + path)).json()["data"]
                assert (model["id"], model["max_model_len"]) == ("policy", WINDOW)
            assert (await http.head(f"{prefix}/api/hello")).status_code == 200
            assert (await http.get(f"{prefix}/health")).status_code == 200
            assert (await http.get(f"{prefix}/v1/responses")).status_code == 426
        assert (await http.get("/s/nonsense/v1/models")).status_code == 401
    assert [model.id async for model in openai_client(rig).models.list()] == ["policy"]
    assert [model.id async for model in anthropic_client(rig).models.list()] == ["policy"]
    assert (await openai_client(rig).models.retrieve("gpt-x")).id == "gpt-x"
    assert rig.seen == [] and rig.events() == []


async def test_counting_tokens_is_no_call(rig: Rig) -> None:
    count = await anthropic_client(rig).messages.count_tokens(model="claude-x", messages=USER)
    assert count.input_tokens == 3 and rig.seen[0]["model"] == "policy" and rig.events() == []


# --- what is refused, and how


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "n", 2),
        (CHAT, "best_of", 3),
        (CHAT, "use_beam_search", True),
        (CHAT, "logit_bias", {"5": -100}),
        (CHAT, "prompt_logprobs", 0),
        (CHAT, "logits_processors", ["x"]),
        (CHAT, "min_tokens", 5),
        (CHAT, "thinking_token_budget", 10),
        (CHAT, "add_generation_prompt", False),
        (COMPLETIONS, "n", 2),
        (COMPLETIONS, "prompt", ["a", "b"]),
        (COMPLETIONS, "prompt_embeds", "AAAA"),
        (COMPLETIONS, "echo", True),
        (COMPLETIONS, "suffix", "x"),
        (RESPONSES, "background", True),
        (RESPONSES, "previous_response_id", "resp_1"),
        (RESPONSES, "conversation", "conv_1"),
        (RESPONSES, "truncation", "auto"),
        (RESPONSES, "logit_bias", {"5": 1}),
        (MESSAGES, "vllm_xargs", {"x": 1}),
        (MESSAGES, "mcp_servers", [{"url": "u"}]),
    ],
)
async def test_fields_that_change_the_meaning_are_refused_by_name(rig: Rig, path: str, field: str, value: Any) -> None:
    answer = await post(rig, path, **{field: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and f"'{field}'" in error["message"] and error["type"] == "invalid_request_error"
    assert rig.seen == [] and [event["reason"] for event in rig.events()] == ["field"]
    assert rig.read().state("g1-0.0").refused == 1
    if path != MESSAGES:
        assert error["param"] == field
        with pytest.raises(openai.BadRequestError):
            await ask(rig, path, **{field: value})


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (CHAT, {"n": 1, "best_of": None, "logit_bias": {}, "use_beam_search": False, "min_tokens": 0, "temperature": 0}),
        (COMPLETIONS, {"prompt": [1, 2, 3], "n": 1, "echo": False}),
        (COMPLETIONS, {"prompt": ["one"]}),
        (RESPONSES, {"background": False, "previous_response_id": None, "truncation": "disabled", "store": False}),
    ],
)
async def test_harmless_values_of_those_fields_pass(rig: Rig, path: str, extra: dict[str, Any]) -> None:
    assert (await post(rig, path, **extra)).status_code == 200


@pytest.mark.parametrize("path", list(BODIES))
async def test_bodies_that_cannot_be_read(rig: Rig, path: str) -> None:
    async with client(rig) as http:
        url = f"/s/{rig.token()}{path}"
        answers = [
            await http.post(url, content=b"{"),
            await http.post(url, content=b"[1]"),
            await http.post(url, content=b"\xff\xfe"),
            await http.post(url, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"}),
            await http.post(url, content=b"x" * 1001),
            await http.post(url, content=_pieces(30, 100)),
        ]
    assert [answer.status_code for answer in answers] == [400, 400, 400, 415, 413, 413]
    kinds = {answer.json()["error"]["type"] for answer in answers}
    assert kinds == ({"invalid_request_error", "request_too_large"} if path == MESSAGES else {"invalid_request_error"})
    assert rig.seen == []


async def _pieces(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 64 tokens. However, your prompt contains 70 input tokens, which exceeds this limit.",
        "The engine prompt length 70 exceeds the max_model_len 64. Please reduce prompt.",
        "Input length (70) exceeds model's maximum context length (64).",
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    ],
)
async def test_overflow_has_the_words_that_harnesses_know(rig: Rig, path: str, stream: bool, words: str) -> None:
    error: Any = anthropic.BadRequestError if path == MESSAGES else openai.BadRequestError
    with pytest.raises(error) as caught:
        await ask(rig, path, script=400, words=words, stream=stream)
    if path == MESSAGES:
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert caught.value.body["error"]["message"].startswith("prompt is too long: ")
        assert "70 tokens > 64 maximum" in str(caught.value) or "70" not in words
    else:
        assert caught.value.code == "context_length_exceeded" and "maximum context length" in caught.value.body["message"]
    assert [event["reason"] for event in rig.events()] == ["overflow"]
    state = rig.read().state("g1-0.0")
    assert state.overflow and not state.limit
    assert (await post(rig, path)).status_code == 200  # the session goes on: the harness may compact
    assert not rig.read().state("g1-0.0").overflow


async def test_a_prompt_as_long_as_the_window(rig: Rig) -> None:
    one = await post(rig, ids=list(range(WINDOW - 1)), max_tokens=9)
    assert one.json()["choices"][0]["finish_reason"] == "length" and rig.events("length")[0]["ids"] == [11]
    none = await post(rig, ids=list(range(WINDOW)))
    assert none.status_code == 400 and none.json()["error"]["code"] == "context_length_exceeded"


async def test_a_cap_of_zero_is_the_requests_own_fault(rig: Rig) -> None:
    answer = await post(rig, script=400, words="max_tokens must be at least 1, got 0.", max_tokens=0)
    assert answer.json()["error"]["code"] is None and rig.events()[0]["reason"] == "invalid"


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("script", [500, "raise", "fail"])
async def test_faults_are_the_dialects_500_with_a_request_id(rig: Rig, path: str, script: Any) -> None:
    error: Any = anthropic.InternalServerError if path == MESSAGES else openai.InternalServerError
    with pytest.raises(error) as caught:
        await ask(rig, path, script=script)
    assert caught.value.status_code == 500 and caught.value.request_id.startswith("req_")
    assert caught.value.request_id in str(caught.value) and "fire" not in str(caught.value)
    if script == "fail":
        assert [event["event"] for event in rig.events()] == ["open", "failed", "undelivered"]
    else:
        assert [event["reason"] for event in rig.events()] == ["engine"]


async def test_other_errors_keep_their_text(rig: Rig) -> None:
    answer = await post(rig, MESSAGES, script=422, words="messages.0.content is odd")
    assert answer.status_code == 422 and answer.json()["error"] == {"type": "invalid_request_error", "message": "messages.0.content is odd"}
    busy = await post(rig, MESSAGES, script=503, words="busy")
    assert busy.status_code == 503 and busy.json()["error"]["type"] == "overloaded_error" and busy.headers["retry-after"] == "1"


# --- what is changed on the way


@pytest.mark.parametrize(
    ("path", "field", "asked"),
    [(CHAT, "max_completion_tokens", 4096), (MESSAGES, "max_tokens", 32000), (RESPONSES, "max_output_tokens", 4096)],
)
async def test_a_cap_above_the_window_is_an_upper_bound(rig: Rig, path: str, field: str, asked: int) -> None:
    assert (await post(rig, path, **{field: asked})).status_code == 200
    assert rig.seen[0][field] == WINDOW and rig.contexts[0].asked_tokens == asked
    assert (await post(rig, path, **{field: 2})).status_code == 200
    assert rig.seen[1][field] == 2 and rig.contexts[1].asked_tokens == 2
    assert [event["max_tokens"] for event in rig.events("open")] == [WINDOW - 3, 2]


async def test_any_model_name_is_served_and_others_are_side_calls(rig: Rig) -> None:
    assert (await post(rig, model="gpt-4o-mini")).json()["model"] == "policy"
    await post(rig)
    await post(rig, model="openai/policy")
    assert [body["model"] for body in rig.seen] == ["policy"] * 3 and [c.kind for c in rig.contexts] == ["aux", "agent", "agent"]


async def test_an_unchanged_body_arrives_byte_for_byte(tmp_path: Path) -> None:
    arrived: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        arrived.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    rig = Rig(tmp_path)
    rig.edge._app = app
    text = b'{"messages" : [{"role":"user","content":"\\u00e9 \\/ 1.0"}],"model":"policy" }'
    async with client(rig) as http:
        await http.post(f"/s/{rig.token()}{CHAT}", content=text)
        await http.post(f"/s/{rig.token()}{CHAT}", content=text.replace(b'"policy"', b'"other"'))
    rig.log.close()
    assert arrived[0] == text
    assert json.loads(arrived[1]) == json.loads(text)


async def test_what_vllm_would_mistake_is_put_right(rig: Rig) -> None:
    await post(rig, CHAT, tools=[], tool_choice="auto")
    await post(rig, MESSAGES, thinking={"type": "enabled", "budget_tokens": 31999})
    items = [{"role": "assistant", "content": [{"type": "output_text", "text": "one"}]}, {"role": "assistant", "content": []}]
    tool = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}
    await post(rig, RESPONSES, input=[{"role": "user", "content": "1"}, *items, {"type": "reasoning", "summary": []}], tools=[tool])
    chat, messages, responses = rig.seen
    assert "tools" not in chat and "tool_choice" not in chat
    assert messages["thinking"] == {"type": "adaptive"}
    assert [item.get("type") for item in responses["input"]] == [None, "message", "reasoning"]
    assert responses["tools"][0]["format"] == {"type": "text"}


@pytest.mark.parametrize("nonce", ["36ee5", "0aaa9"])
async def test_a_nonce_in_front_of_the_system_prompt_does_not_end_the_prefix(rig: Rig, nonce: str) -> None:
    text = f"x-anthropic-billing-header: cc_version=2.1.1; cch={nonce};\nYou are an agent."
    await post(rig, MESSAGES, system=text)
    await post(rig, CHAT, messages=[{"role": "system", "content": text}, *USER])
    assert rig.seen[0]["system"] == rig.seen[1]["messages"][0]["content"] == "You are an agent."
    await post(rig, MESSAGES, system="request-id: 7f3a\nYou are an agent.")
    assert rig.seen[2]["system"].startswith("request-id")


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        (r"a\ud83d b", "a\ufffd b"),
        (r"\uDE00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ude00 \\ud83d", "😀 \\ud83d"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\\ud83d\uDE00", "\\ud83d\ufffd"),
    ],
)
async def test_half_a_character_is_what_it_would_be_without_escapes(rig: Rig, sent: str, seen: str) -> None:
    async with client(rig) as http:
        body = f'{{"model": "policy", "messages": [{{"role": "user", "content": "{sent}"}}]}}'
        assert (await http.post(f"/s/{rig.token()}{CHAT}", content=body.encode())).status_code == 200
    assert [message["content"] for message in rig.seen[0]["messages"]] == [seen]


async def test_no_header_of_the_clients_reaches_vllm(rig: Rig) -> None:
    """It would take the request's id, its priority and its place in the engine from there."""
    real, scopes = rig.edge._app, []

    async def look(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await real(scope, receive, send)

    rig.edge._app = look
    given = {"x-request-id": "r", "x-vllm-priority": "-9", "x-data-parallel-rank": "3", "x-session-id": "s", "authorization": "Bearer x"}
    async with client(rig) as http:
        answer = await http.post(f"/s/{rig.token()}{CHAT}", json=BODIES[CHAT], headers=given)
    assert answer.status_code == 200
    assert [sorted(name for name, _ in scope["headers"]) for scope in scopes] == [[b"content-length", b"content-type"]]


async def test_a_session_that_closes_while_the_body_comes(rig: Rig) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield json.dumps(BODIES[CHAT]).encode()
        rig.index.close("g1-0.0")

    async with client(rig) as http:
        assert (await http.post(f"/s/{rig.token()}{CHAT}", content=body())).status_code == 403
    assert rig.seen == []


# --- limits


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_limit_of_calls_ends_the_session(tmp_path: Path, path: str) -> None:
    rig = Rig(tmp_path, Limits(calls=2))
    for number in range(2):
        assert (await post(rig, path, ids=[number])).status_code == 200
    error: Any = anthropic.BadRequestError if path == MESSAGES else openai.BadRequestError
    for _ in range(2):
        with pytest.raises(error, match="prompt is too long" if path == MESSAGES else "maximum context length"):
            await ask(rig, path)
    assert [event["limit"] for event in rig.events("session")] == ["calls"]
    assert [event["reason"] for event in rig.events("refused")] == ["limit", "limit"]
    assert (await post(rig, path, rig.token("another"))).status_code == 200
    rig.log.close()


async def test_a_limit_of_sampled_tokens(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Limits(sampled_tokens=5))
    first, second, third = [await post(rig, ids=[number]) for number in range(3)]
    assert first.json()["choices"][0]["finish_reason"] == "stop" and second.json()["choices"][0]["finish_reason"] == "length"
    assert third.status_code == 400 and third.json()["error"]["code"] == "context_length_exceeded"
    state = rig.read().state("g1-0.0")
    assert (state.limit, state.sampled_tokens) == ("tokens", 5)
    assert len(rig.events("session")) == 1
    rig.log.close()


async def test_a_limit_of_context(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Limits(context_tokens=10))
    assert (await post(rig, ids=[1] * 10)).json()["error"]["code"] == "context_length_exceeded"
    assert rig.read().state("g1-0.0").limit == "context" and [event["reason"] for event in rig.events("refused")] == ["limit"]
    rig.log.close()
