"""Requests that wait at the edge: how they are turned away, kept alive, and how session limits hold for calls at the same time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from forge_ray.config import Limits
from forge_ray.serve_proxy.admission import Admission
from tests.unit.edge_app import Rig
from tests.unit.test_edge import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, ask, post
from tests.unit.test_edge_wire import WAIT_S, serve, until

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)


def told(answer: httpx.Response, path: str) -> str:
    """The error's text; its shape is the dialect's."""
    body = answer.json()
    if path == MESSAGES:
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"} and body["request_id"].startswith("req_")
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_above_the_bound_429_says_when_in_header_and_text(tmp_path: Path, path: str, stream: bool) -> None:
    rig = Rig(tmp_path, admission=Admission(1, 0))
    first = asyncio.create_task(post(rig, path, script="wait"))
    await until(lambda: bool(rig.events("open")))
    answer = await post(rig, path, rig.token("another"), stream=stream)
    seconds = answer.headers["retry-after"]
    assert answer.status_code == 429 and seconds.isdecimal() and int(seconds) >= 1
    assert f"retry-after: {seconds}" in told(answer, path) and f"try again in {seconds}s" in told(answer, path)
    error: Any = anthropic.RateLimitError if path == MESSAGES else openai.RateLimitError
    with pytest.raises(error):
        await ask(rig, path, rig.token("another"), stream=stream)
    assert [event["reason"] for event in rig.events("refused")] == ["busy", "busy"]
    rig.gate.set()
    assert (await first).status_code == 200 and (await post(rig, path, rig.token("another"), stream=stream)).status_code == 200
    rig.log.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_long_update_is_503_with_retry_after(tmp_path: Path, path: str, stream: bool) -> None:
    rig = Rig(tmp_path, admission=Admission(4, 4, 0.05))
    rig.admission.pause()
    for _ in range(2):  # one that has waited, one that comes when it is too late
        answer = await post(rig, path, stream=stream)
        assert answer.status_code == 503 and "retry-after: 5" in told(answer, path) and answer.headers["retry-after"] == "5"
    assert [event["reason"] for event in rig.events("refused")] == ["paused", "paused"] and not rig.events("open")
    rig.admission.resume()
    assert (await post(rig, path, stream=stream)).status_code == 200
    rig.log.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_an_update_is_waited_for(tmp_path: Path, path: str, stream: bool) -> None:
    rig = Rig(tmp_path)
    rig.admission.pause()
    asking = asyncio.create_task(post(rig, path, stream=stream))
    await until(lambda: rig.admission.waiting == 1)
    assert not rig.events()
    rig.admission.resume()
    assert (await asking).status_code == 200 and await rig.edge.drained("g1-0.0", WAIT_S)
    assert rig.read().session("g1-0.0")[0].trainable and rig.admission.status()["running"] == 0
    rig.log.close()


@asynccontextmanager
async def over_the_wire(rig: Rig) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    async with serve(rig.edge) as url, httpx.AsyncClient(timeout=WAIT_S) as http:
        yield http, url
    rig.log.close()


KEEP_ALIVE = dict.fromkeys(PATHS, b": keep-alive\n\n") | {MESSAGES: b'event: ping\ndata: {"type": "ping"}\n\n'}


@pytest.mark.parametrize("path", PATHS)
async def test_a_silent_stream_is_kept_alive(tmp_path: Path, path: str) -> None:
    rig = Rig(tmp_path, keepalive_s=0.2)
    async with over_the_wire(rig) as (http, url):
        rig.admission.pause()
        body = BODIES[path] | {"stream": True, "script": "wait"}
        async with http.stream("POST", f"{url}/s/{rig.token()}{path}", json=body) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            pieces = answer.aiter_raw()
            assert [await anext(pieces), await anext(pieces)] == [KEEP_ALIVE[path]] * 2  # before the first token
            assert not rig.events()
            rig.admission.resume()
            seen = b""
            while b"token 11" not in seen:
                seen += await anext(pieces)
            assert await anext(pieces) == KEEP_ALIVE[path]  # and between tokens
            rig.gate.set()
            rest = b"".join([piece async for piece in pieces])
        assert b"token 12" in rest
        assert await rig.edge.drained("g1-0.0", WAIT_S)
        assert rig.read().session("g1-0.0")[0].trainable


@pytest.mark.parametrize("path", PATHS)
async def test_official_clients_read_streams_that_were_kept_alive(tmp_path: Path, path: str) -> None:
    rig = Rig(tmp_path, keepalive_s=0.02)
    rig.admission.pause()
    asking = asyncio.create_task(_collect(rig, path))
    await asyncio.sleep(0.2)
    rig.admission.resume()
    kinds = await asking
    assert kinds and "ping" not in kinds
    rig.log.close()


async def _collect(rig: Rig, path: str) -> list[str]:
    return [getattr(event, "type", "chunk") async for event in await ask(rig, path, stream=True)]


def last_event(text: str) -> dict[str, Any]:
    return json.loads([line for line in text.splitlines() if line.startswith("data: {")][-1][6:])


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_the_headers_is_the_streams_last_event(tmp_path: Path, path: str) -> None:
    rig = Rig(tmp_path, admission=Admission(4, 4, 1.0), keepalive_s=0.1)
    async with over_the_wire(rig) as (http, url):
        rig.admission.pause()
        answer = await http.post(f"{url}/s/{rig.token()}{path}", json=BODIES[path] | {"stream": True})
        assert answer.status_code == 200 and answer.content.startswith(KEEP_ALIVE[path])
        event = last_event(answer.text)
        if path == RESPONSES:
            assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
            error = event["response"]["error"]
        else:
            assert path != MESSAGES or (event["type"] == "error" and "event: error\n" in answer.text)
            error = event["error"]
        assert "retry-after: 5" in error["message"]
        kind = error.get("code" if path == RESPONSES else "type")
        assert kind == {MESSAGES: "overloaded_error", RESPONSES: "server_is_overloaded"}.get(path, "server_error")
        assert [event["reason"] for event in rig.events("refused")] == ["paused"]


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_fails_before_the_first_token_is_a_500(tmp_path: Path, path: str) -> None:
    rig = Rig(tmp_path)
    answer = await post(rig, path, stream=True, script="fail at once")
    assert answer.status_code == 500 and "req_" in told(answer, path) and "fire" not in answer.text
    assert await rig.edge.drained("g1-0.0", WAIT_S)
    assert [event["event"] for event in rig.events()] == ["open", "failed", "undelivered"]
    assert (await post(rig, path, stream=True)).status_code == 200
    rig.log.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_session_that_closes_while_its_request_waits(tmp_path: Path, path: str, stream: bool) -> None:
    rig = Rig(tmp_path, admission=Admission(1, 8))
    running = asyncio.create_task(post(rig, path, rig.token("another"), script="wait"))
    await until(lambda: bool(rig.events("open")))
    waiting = asyncio.create_task(post(rig, path, stream=stream))
    await until(lambda: rig.admission.waiting == 1)
    rig.index.close("g1-0.0")
    rig.admission.drop("g1-0.0")
    answer = await waiting
    assert answer.status_code == 403 and "closed" in told(answer, path)
    rig.gate.set()
    assert (await running).status_code == 200 and rig.admission.status()["running"] == 0
    assert not rig.read().session("g1-0.0")
    rig.log.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue(tmp_path: Path, stream: bool) -> None:
    rig = Rig(tmp_path, admission=Admission(1, 8))
    async with over_the_wire(rig) as (http, url):
        running = asyncio.create_task(post(rig, CHAT, rig.token("another"), script="wait"))
        await until(lambda: bool(rig.events("open")))
        waiting = asyncio.create_task(http.post(f"{url}/s/{rig.token()}{CHAT}", json=BODIES[CHAT] | {"stream": stream}))
        await until(lambda: rig.admission.waiting == 1)
        waiting.cancel()
        await until(lambda: rig.admission.waiting == 0)
        rig.gate.set()
        assert (await running).status_code == 200 and rig.admission.status()["running"] == 0
        assert not rig.read().session("g1-0.0")


# --- limits, with calls at the same time


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_of_calls_holds_for_calls_at_the_same_time(tmp_path: Path, stream: bool) -> None:
    rig = Rig(tmp_path, Limits(calls=3))
    asking = [asyncio.create_task(post(rig, ids=[number], script="wait", stream=stream)) for number in range(8)]
    await until(lambda: len(rig.events("open")) == 3)
    rig.gate.set()
    statuses = sorted([(await request).status_code for request in asking])
    assert statuses == [200] * 3 + [400] * 5 and len(rig.events("open")) == 3
    assert [event["limit"] for event in rig.events("session")] == ["calls"]
    assert {event["reason"] for event in rig.events("refused")} == {"limit"}
    rig.log.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cap", [None, 2])
async def test_a_limit_of_tokens_holds_for_calls_at_the_same_time(tmp_path: Path, stream: bool, cap: int | None) -> None:
    """Each scripted reply has three tokens, or two where it is capped; eight tokens are three replies (four), then none."""
    rig = Rig(tmp_path, Limits(sampled_tokens=8))
    rig.gate.set()
    answers = await asyncio.gather(*(post(rig, ids=[number], max_tokens=cap, stream=stream) for number in range(8)))
    assert await rig.edge.drained("g1-0.0", WAIT_S)
    state = rig.read().state("g1-0.0")
    assert (state.sampled_tokens, state.limit) == (8, "tokens")
    expected = [2, 2, 2, 2] if cap else [3, 3, 2]
    assert [len(call.ids) for call in rig.read().session("g1-0.0")] == expected
    refused = [answer for answer in answers if answer.status_code == 400]
    assert len(refused) == 8 - len(expected)
    assert all(re.search("maximum context length", told(answer, CHAT)) for answer in refused)
    rig.log.close()


async def test_calls_that_fit_together_run_together(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Limits(sampled_tokens=9), admission=Admission(4, 8))
    asking = [asyncio.create_task(post(rig, ids=[number], max_tokens=3, script="wait")) for number in range(4)]
    await until(lambda: len(rig.events("open")) == 3)
    await until(lambda: rig.admission.waiting == 1)  # the fourth keeps no place while it waits for what the others may leave
    rig.gate.set()
    assert sorted([(await request).status_code for request in asking]) == [200] * 3 + [400]
    rig.log.close()


async def test_a_limit_of_context_in_a_stream_is_a_400(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Limits(context_tokens=10))
    answer = await post(rig, ids=[1] * 10, stream=True)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert rig.read().state("g1-0.0").limit == "context"
    rig.log.close()
