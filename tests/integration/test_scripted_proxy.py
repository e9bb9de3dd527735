"""The recording around an engine whose every token is known: what was emitted, cut, refused or lost is what the log and the index say."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.scripted import Scripted, scripted

DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}),
}
CALL = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def _ids(proxy: Scripted, text: str) -> list[int]:
    return [*proxy.engine.tokenizer.encode(text, add_special_tokens=False), proxy.engine.tokenizer.eos_token_id]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_the_recording_is_the_script(tmp_path: Path, stream: bool) -> None:
    from forge_ray.serve_proxy.scripted_engine import logprob

    async with scripted(tmp_path, [{"turn": 0, "say": CALL}]) as proxy:
        for dialect, (path, body) in DIALECTS.items():
            response = await proxy.http.post(proxy.url(dialect) + path, json={"model": "policy", "stream": stream, **body})
            assert response.status_code == 200, response.text
            (call,) = proxy.calls(dialect)
            assert call.ids == _ids(proxy, CALL)
            assert call.logprobs == pytest.approx([logprob(position, token) for position, token in enumerate(call.ids)])
            assert call.spans == [("1.0", 0, len(call.ids))]
            assert (call.status, call.delivered, call.dialect) == ("finished", True, dialect)


async def test_turns_and_tools_and_the_last_reply(tmp_path: Path) -> None:
    tools = [
        {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
    ]
    rules = [{"if": "bash", "turn": 0, "say": CALL}, {"if": "total 0", "turn": 1, "say": "Empty."}]
    async with scripted(tmp_path, rules) as proxy:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "what is here?"}]
        url = proxy.url("tools") + "/v1/chat/completions"
        reply = (await proxy.http.post(url, json={"model": "policy", "messages": messages, "tools": tools})).json()["choices"][0]["message"]
        assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == {"command": "ls"}
        assert proxy.index.state("tools").counts["replica"].last_reply == "tool_calls"
        messages += [{key: reply[key] for key in ("role", "content", "tool_calls")}]
        messages += [{"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "total 0"}]
        answer = await proxy.http.post(url, json={"model": "policy", "messages": messages, "tools": tools})
        assert answer.json()["choices"][0]["message"]["content"] == "Empty."
        first, second = proxy.calls("tools")
        assert (second.parent, second.conversation) == (first.id, first.conversation)
        assert proxy.index.state("tools").counts["replica"].last_reply == "answer"


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_a_stop_string_trims_the_text_and_no_recorded_token(tmp_path: Path, stream: bool) -> None:
    async with scripted(tmp_path, [{"say": "ls\nObservation: x and more"}]) as proxy:
        response = await proxy.chat("stop", stop=["Observation:"], stream=stream)
        (call,) = proxy.calls("stop")
        text = proxy.engine.tokenizer.decode(call.ids)
        assert text.startswith("ls\nObservation:") and "more" not in text
        assert proxy.engine.tokenizer.decode(call.ids[:-1]).find("Observation:") == -1
        assert len(call.ids) == len(call.logprobs)
        assert (call.status, call.finish_reason, call.stop_reason) == ("finished", "stop", "Observation:")
        assert "Observation" not in response.text.replace('"stop_reason":"Observation:"', "")


async def test_a_cap_ends_the_call_and_only_a_session_limit_ends_the_session(tmp_path: Path) -> None:
    limits = {"limits": {"sampled_tokens": 12, "calls": 5}}
    async with scripted(tmp_path, [{"say": "word " * 50}], proxy=limits) as proxy:
        assert (await proxy.chat("caps", max_tokens=5)).json()["choices"][0]["finish_reason"] == "length"
        assert proxy.index.exhausted("caps") is None
        assert (await proxy.chat("caps")).status_code == 200
        first, second = proxy.calls("caps")
        assert [first.max_tokens, second.max_tokens, len(first.ids), len(second.ids)] == [5, 7, 5, 7]
        assert proxy.index.exhausted("caps") == "tokens"
        assert (await proxy.chat("caps")).status_code >= 400
        assert len(proxy.calls("caps")) == 2


async def test_the_context_limit_ends_a_session_in_the_words_of_an_overflow(tmp_path: Path) -> None:
    async with scripted(tmp_path, [{"say": "word " * 50}], proxy={"limits": {"context_tokens": 40}}) as proxy:
        fits = await proxy.chat("context", "hi")
        (call,) = proxy.calls("context")
        assert len(call.prompt_ids) + len(call.ids) == 40 and fits.json()["choices"][0]["finish_reason"] == "length"
        assert proxy.index.state("context").limit == "context"
        over = await proxy.chat("over", "word " * 60)
        assert over.status_code == 400 and "maximum context length" in over.text
        assert proxy.calls("over") == [] and proxy.index.state("over").limit == "context"


async def test_an_engine_failure_is_recorded_as_ours(tmp_path: Path) -> None:
    async with scripted(tmp_path, [{"say": "word " * 20, "fault": "fail", "after": 3}]) as proxy:
        response = await proxy.chat("fail", stream=True)
        (call,) = proxy.calls("fail")
        assert (call.status, len(call.ids), call.spans) == ("failed", 3, None)
        assert "the script says" in call.error
        assert proxy.index.state("fail").counts["replica"].failed == 1
        assert not call.trainable and "[DONE]" not in response.text.split("error")[0]


async def test_a_refused_request_is_no_engine_failure(tmp_path: Path) -> None:
    async with scripted(tmp_path, [{"say": "x"}]) as proxy:
        response = await proxy.chat("refused", response_format={"type": "structural_tag", "structures": [], "triggers": []})
        assert response.status_code in (200, 400)
        assert (
            proxy.index.state("refused").counts.get("replica", None) is None or proxy.index.state("refused").counts["replica"].failed == 0
        )


async def test_ending_a_session_ends_its_hanging_call(tmp_path: Path) -> None:
    async with scripted(tmp_path, [{"say": "word " * 20, "fault": "hang", "after": 4}]) as proxy:
        request = asyncio.create_task(proxy.chat("hang", stream=True))
        while not any(len(call.ids) == 4 for call in proxy.recorder.live.values()):
            await asyncio.sleep(0.01)
        assert await proxy.engine.abort_session("hang") == 1
        await request
        (call,) = proxy.calls("hang")
        assert (call.status, len(call.ids), call.version_open, call.version_end) == ("cancelled", 4, "1.0", "1.0")
        assert proxy.recorder.live == {}


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("how", ["socket", "serve"])
async def test_a_client_that_goes_away_ends_the_call(tmp_path: Path, how: str, stream: bool) -> None:
    """`socket`: a real server sees the connection close. `serve`: the task that runs the app is cancelled, as Serve does it."""
    async with scripted(tmp_path, [{"say": "word " * 100, "fault": "hang", "after": 4}]) as proxy:
        body = json.dumps({"model": "policy", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}).encode()
        path = proxy.url("gone") + "/v1/chat/completions"
        leave = await (_socket_client if how == "socket" else _task)(proxy, path, body)
        while not any(stream is False or len(call.ids) == 4 for call in proxy.recorder.live.values()):
            await asyncio.sleep(0.01)
        await leave()
        while proxy.recorder.live:
            await asyncio.sleep(0.01)
        assert await proxy.edge.drained("gone", 30)
        (call,) = proxy.calls("gone")
        assert call.status == "cancelled" and call.delivered is not True
        assert len(call.ids) == (4 if stream else 0)


async def _socket_client(proxy: Scripted, path: str, body: bytes) -> Any:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(proxy.app, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    _, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )
    await writer.drain()

    async def leave() -> None:
        writer.close()
        while proxy.recorder.live:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving

    return leave


async def _task(proxy: Scripted, path: str, body: bytes) -> Any:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        return None

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    scope |= {"client": ("c", 1), "server": ("s", 1)}
    task = asyncio.create_task(proxy.app(scope, receive, send))

    async def leave() -> None:
        task.cancel()
        await asyncio.wait([task])

    return leave


async def test_any_model_name_is_served(tmp_path: Path) -> None:
    async with scripted(tmp_path, [{"say": "x"}]) as proxy:
        request = {"model": "claude-opus", "messages": [{"role": "user", "content": "title?"}], "max_tokens": 9}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy.app), base_url="http://proxy") as http:
            assert (await http.post(proxy.url("side") + "/v1/messages", json=request)).status_code == 200
        assert [call.kind for call in proxy.calls("side")] == ["aux"]
