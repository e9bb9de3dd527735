"""What the proxy does with a request's own wishes: caps, sampling parameters, grammar; and with a client that goes away."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest

from tests.integration.conftest import WINDOW, Served
from tests.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
SAY = [{"role": "user", "content": "say something long"}]


async def _post(url: str, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=300) as http:
        return await http.post(url + path, json={"model": "policy", **body})


async def test_the_policy_samples_as_the_run_says_whatever_the_harness_asks(served: Served) -> None:
    """The model's generation_config and every knob of the request are ignored in training; what was used is recorded."""
    session, url = served.session("forced")
    wishes: dict[str, Any] = {"temperature": 0.0, "top_p": 0.1, "top_k": 1, "min_p": 0.5, "seed": 7, "stop": ["zzzz"]}
    wishes |= {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.9}
    response = await _post(url, CHAT, messages=SAY, max_tokens=6, **wishes)
    assert response.status_code == 200, response.text
    (call,) = served.calls(session)
    neutral: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "min_tokens": 0, "stop": ["zzzz"]}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None, "bad_words": []}
    assert {name: call.sampling[name] for name in neutral} == neutral


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": SAY, "max_tokens": 32_000}),
        (CHAT, {"messages": SAY, "max_completion_tokens": 4096}),
        ("/v1/responses", {"input": "say something long", "max_output_tokens": 4096}),
        ("/v1/messages", {"messages": SAY, "max_tokens": 32_000}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cap_above_the_window_is_clamped(served: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    session, url = served.session("cap")
    request = asyncio.create_task(_post(url, path, stream=stream, **body))
    while not (calls := served.calls(session)) and not request.done():
        await asyncio.sleep(0.05)
    if not calls:
        assert (await request).status_code == 200, (await request).text
        calls = served.calls(session)
    assert calls[0].max_tokens == WINDOW - len(calls[0].prompt_ids)
    # Long enough seen: ending the session ends the call.
    await served.client.close_session(session)
    response = await request
    assert response.status_code == 200, response.text


async def test_prompts_at_the_edge_of_the_window(served: Served) -> None:
    """One token of room is one token; no room is the dialect's overflow error, and the session says so."""
    tokenizer = Reference(served.config.policy.model.path).tokenizer
    session, url = served.session("edge")

    def messages(tokens: int) -> list[dict[str, str]]:
        for words in range(tokens):
            found = [{"role": "user", "content": "word" + " import" * words}]
            text = tokenizer.apply_chat_template(found, add_generation_prompt=True, tokenize=False)
            if len(tokenizer.encode(text, add_special_tokens=False)) == tokens:
                return found
        raise AssertionError("no such prompt")

    room = WINDOW - 1
    fits = await _post(url, CHAT, messages=messages(room))
    assert fits.status_code == 200, fits.text
    (call,) = served.calls(session)
    assert (len(call.prompt_ids), call.max_tokens, call.status) == (room, 1, "length")
    full, over_url = served.session("over")
    over = await _post(over_url, CHAT, messages=messages(WINDOW))
    assert over.status_code == 400 and "maximum context length" in over.text
    assert served.calls(full) == []
    summary = await served.client.close_session(session)
    assert (summary.limit, summary.last_reply, summary.overflow) == (None, "length", False)
    assert (await served.client.close_session(full)).overflow


async def test_a_call_under_a_grammar_is_flagged(served: Served) -> None:
    session, url = served.session("grammar")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    await _post(url, CHAT, messages=SAY, max_tokens=30)
    response = await _post(
        url, CHAT, messages=SAY, max_tokens=30, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    )
    assert response.status_code == 200, response.text
    await served.client.close_session(session)  # waits for what is written once the reply is over
    plain, masked = served.calls(session)
    assert (plain.masked_by_grammar, masked.masked_by_grammar) == (False, True)
    assert plain.trainable and not masked.trainable


async def _drop(url: str) -> None:
    """Begin a long streamed call and go away in the middle of it."""
    async with (
        httpx.AsyncClient(timeout=300) as http,
        http.stream("POST", url + CHAT, json={"model": "policy", "messages": SAY, "max_tokens": 1900, "stream": True}) as response,
    ):
        lines = 0
        async for line in response.aiter_lines():
            lines += line.startswith("data: ")
            if lines == 10:
                return


async def _drop_unstreamed(served: Served, session: str, url: str) -> None:
    """The same for a call that says nothing before its end."""
    async with httpx.AsyncClient(timeout=300) as http:
        asking = asyncio.create_task(http.post(url + CHAT, json={"model": "policy", "messages": SAY, "max_tokens": 1900}))
        while not served.calls(session) and not asking.done():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        asking.cancel()
        await asyncio.wait([asking])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_the_engines_request(served: Served, stream: bool) -> None:
    """Recorded as cancelled with the version at both ends, not as a finished sample, and the engine stops. HAProxy tells the replica also
    of the client of an unstreamed request (`option abortonclose`)."""
    for _ in range(8):
        session, url = served.session("dropped")
        await (_drop(url) if stream else _drop_unstreamed(served, session, url))
        while any(replica["live"] or replica["running"] for replica in await served.client.status()):
            await asyncio.sleep(0.1)
        summary = await served.client.close_session(session)
        (call,) = served.calls(session)
        assert call.status != "length", "the engine went on to the end"
        if call.status == "cancelled":
            break  # else the random model ended its reply before the client went away
    assert call.status == "cancelled" and call.spans is None and not call.trainable
    assert call.version_open == call.version_end != ""
    assert (5 if stream else 0) <= len(call.ids) < 1900
    assert call.delivered is not True
    assert (summary.calls, summary.last_status) == (0, "cancelled")


async def test_closing_a_session_aborts_its_calls_and_refuses_later_ones(served: Served) -> None:
    session, url = served.session("closing")
    request = asyncio.create_task(_post(url, CHAT, messages=SAY, max_tokens=1900, stream=True))
    while not served.calls(session) and not request.done():
        await asyncio.sleep(0.02)
    summary = await served.client.close_session(session)
    await request
    (call,) = served.calls(session)
    assert summary.sampled_tokens == len(call.ids)
    assert summary.last_status == call.status
    later = await _post(url, CHAT, messages=SAY)
    assert later.status_code == 403
    assert len(served.calls(session)) == 1
    assert await served.client.close_session(session) == summary


async def test_a_call_is_on_disk_before_its_last_byte_is_read(served: Served) -> None:
    """The reader looks at the log from another process as soon as the last piece of the stream arrives."""
    session, url = served.session("durable")
    for _ in range(5):
        async with (
            httpx.AsyncClient(timeout=300) as http,
            http.stream("POST", url + CHAT, json={"model": "policy", "messages": SAY, "max_tokens": 12, "stream": True}) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0].get("finish_reason"):
                    assert served.calls(session)[-1].status in ("finished", "length")
    assert len(served.calls(session)) == 5


async def test_a_conversation_is_stored_as_what_is_new(served: Served) -> None:
    session, url = served.session("turns")
    messages = [{"role": "user", "content": "first " * 50}]
    for turn in range(3):
        reply = (await _post(url, CHAT, messages=messages, max_tokens=5)).json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"turn {turn}"}]
    calls = served.calls(session)
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id]
    assert len({call.conversation for call in calls}) == 1
    for earlier, later in itertools.pairwise(calls):
        assert later.shared >= len(earlier.prompt_ids)
        assert later.prompt_ids[: later.shared] == (earlier.prompt_ids + earlier.ids)[: later.shared]
