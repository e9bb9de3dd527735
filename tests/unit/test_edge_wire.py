"""The edge on a real server and real connections: streaming, clients that go away, WebSocket handshakes, draining."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.unit.edge_app import Rig

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16},
}
WAIT_S = 60


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    """A uvicorn server on a free port; gives its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="auto"))
    listening = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, WAIT_S)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.wait_for(_until(condition), WAIT_S)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Rig, str]]:
    rig = Rig(tmp_path)
    async with serve(rig.edge) as url:
        yield rig, f"{url}/s/{rig.token()}"
    rig.log.close()


@pytest.mark.parametrize("path", list(BODIES))
async def test_pieces_pass_through_as_they_come(served: tuple[Rig, str], path: str) -> None:
    rig, url = served
    body = BODIES[path] | {"model": "policy", "stream": True, "script": "wait"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http, http.stream("POST", url + path, json=body) as answer:
        pieces = answer.aiter_raw()
        assert b"token 11" in await anext(pieces)
        assert [event["event"] for event in rig.events()] == ["open"]  # the engine has given nothing more
        rig.gate.set()
        rest = b"".join([piece async for piece in pieces])
    assert b"token 12" in rest
    assert await rig.edge.drained("g1-0.0", WAIT_S)
    assert [event["event"] for event in rig.events()] == ["open", "finished", "delivered"]
    assert rig.read().session("g1-0.0")[0].trainable


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_client_that_leaves_a_stream(served: tuple[Rig, str], path: str) -> None:
    rig, url = served
    body = BODIES[path] | {"model": "policy", "stream": True, "script": "wait"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        async with http.stream("POST", url + path, json=body) as answer:
            await anext(answer.aiter_raw())
        assert await rig.edge.drained("g1-0.0", WAIT_S)  # the engine is still waiting: only the leaving can have ended it
    assert [event["event"] for event in rig.events()] == ["open", "cancelled", "undelivered"]
    (call,) = rig.read().session("g1-0.0")
    assert (call.status, call.ids, call.delivered, call.trainable) == ("cancelled", [11], False, False)
    assert not rig.recorder.live


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_client_that_leaves_before_the_answer(served: tuple[Rig, str], path: str) -> None:
    rig, url = served
    body = BODIES[path] | {"model": "policy", "script": "wait"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        asking = asyncio.create_task(http.post(url + path, json=body))
        await until(lambda: bool(rig.events("open")))
        asking.cancel()
        await asyncio.wait([asking])
        assert await rig.edge.drained("g1-0.0", WAIT_S)
    assert [event["event"] for event in rig.events()] == ["open", "cancelled", "undelivered"]


async def test_a_request_whose_task_is_cancelled(tmp_path: Path) -> None:
    """Some servers cancel the application's task when the client leaves, and send no disconnect."""
    rig = Rig(tmp_path)
    body = b'{"model": "policy", "messages": [], "stream": true, "script": "wait"}'
    path = f"/s/{rig.token()}/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "asgi": {"version": "3.0"}}
    sent: list[Any] = []

    async def receive() -> Any:
        if not sent:
            sent.append("body")
            return {"type": "http.request", "body": body}
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    request = asyncio.create_task(rig.edge(scope, receive, send))
    await until(lambda: len(sent) >= 3)
    request.cancel()
    await asyncio.wait([request])
    assert request.cancelled() and await rig.edge.drained("g1-0.0", WAIT_S)
    assert [event["event"] for event in rig.events()] == ["open", "cancelled", "undelivered"]
    rig.log.close()


async def test_a_retry_while_the_first_still_runs(served: tuple[Rig, str]) -> None:
    rig, url = served
    body = BODIES["/v1/chat/completions"] | {"model": "policy", "script": "wait"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        first = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body))
        await until(lambda: len(rig.events("open")) == 1)
        second = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body))
        await until(lambda: len(rig.events("open")) == 2)
        rig.gate.set()
        assert [(await first).status_code, (await second).status_code] == [200, 200]
    assert await rig.edge.drained("g1-0.0", WAIT_S)
    order = [event["call"] for event in rig.events("open")]
    calls = {call.id: call for call in rig.read().session("g1-0.0")}
    assert calls[order[0]].superseded_by == order[1] and [calls[call].trainable for call in order] == [False, True]


async def test_draining_waits_for_running_requests(served: tuple[Rig, str]) -> None:
    rig, url = served
    body = BODIES["/v1/chat/completions"] | {"model": "policy", "script": "wait"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        asking = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body))
        await until(lambda: bool(rig.events("open")))
        assert rig.edge.live("g1-0.0") == 1 and rig.edge.live("other") == 0
        assert not await rig.edge.drained("g1-0.0", 0.05) and await rig.edge.drained("other", 0.05)
        rig.gate.set()
        await asking
    assert await rig.edge.drained("g1-0.0", WAIT_S) and rig.edge.live("g1-0.0") == 0
    assert rig.read().session("g1-0.0")[0].delivered is True


async def test_a_cut_stream_reads_as_cut(served: tuple[Rig, str]) -> None:
    rig, url = served
    body = BODIES["/v1/chat/completions"] | {"model": "policy", "stream": True, "script": "fail"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(f"{url}/v1/chat/completions", json=body)
        again = await http.post(f"{url}/v1/chat/completions", json=body | {"script": "answer"})
        assert again.text.endswith("data: [DONE]\n\n")
    assert await rig.edge.drained("g1-0.0", WAIT_S)
    assert [call.status for call in rig.read().session("g1-0.0")] == ["failed", "finished"]


@pytest.mark.parametrize("path", ["/v1/responses", "/anything"])
async def test_a_websocket_handshake_is_answered_426(served: tuple[Rig, str], path: str) -> None:
    rig, url = served
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answer = await http.get(url + path, headers=headers)
    assert answer.status_code == 426 and rig.seen == []


async def test_many_streams_at_once_of_which_some_are_left(served: tuple[Rig, str]) -> None:
    rig, url = served
    base = url.partition("/s/")[0]
    paths = list(BODIES)

    async def one(http: httpx.AsyncClient, number: int) -> None:
        path = paths[number % 3]
        body = BODIES[path] | {"model": "policy", "stream": True, "script": "wait", "ids": [number]}
        async with http.stream("POST", f"{base}/s/{rig.token(f's{number}')}{path}", json=body) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            if number % 10:
                async for _ in pieces:
                    pass

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as http:
        work = [asyncio.create_task(one(http, number)) for number in range(60)]
        await until(lambda: len(rig.events("cancelled")) == 6)
        rig.gate.set()
        await asyncio.gather(*work)
    for number in range(60):
        assert await rig.edge.drained(f"s{number}", WAIT_S)
    reader = rig.read()
    for number in range(60):
        (call,) = reader.session(f"s{number}")
        assert call.prompt_ids == [number] and call.trainable is bool(number % 10)
    assert not rig.recorder.live and not rig.edge.under_way
