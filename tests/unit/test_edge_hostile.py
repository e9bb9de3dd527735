"""Requests that no harness sends: an answer below 500 in the dialect's words, never an exception."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forge_ray.serve_proxy.dialects.chat import Chat
from forge_ray.serve_proxy.dialects.messages import Messages
from tests.unit.edge_app import Rig

GEMINI = "/v1beta/models/policy:generateContent"
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", GEMINI)
DEPTHS = (300, 900, 100_000)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, max_body_bytes=10_000_000)
    yield rig
    rig.log.close()


async def post(rig: Rig, path: str, body: bytes, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(rig.edge)  # raises what the edge raises
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
        return await http.post(f"/s/{rig.token()}{path}", content=body, headers={"content-type": "application/json", **headers})


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("depth", DEPTHS)
async def test_nesting_without_end(rig: Rig, path: str, depth: int) -> None:
    for key in ("a", "messages", "input", "contents", "tools", "metadata"):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        answer = await post(rig, path, b'{"max_tokens": 4, "%s": %s}' % (key.encode(), nested))
        assert answer.status_code < 500 and answer.json()
        if depth == max(DEPTHS):
            assert answer.status_code == 400 and "not a JSON object" in answer.text


async def test_results_within_results(rig: Rig) -> None:
    for depth in (50, 330, 480):
        content = '[{"type": "tool_result", "content": ' * depth + '"x"' + "}]" * depth
        body = f'{{"max_tokens": 4, "messages": [{{"role": "user", "content": {content}}}]}}'
        answer = await post(rig, "/v1/messages", body.encode())
        assert (answer.status_code, answer.json()["type"]) == ((200, "message") if depth == 50 else (400, "error"))


@pytest.mark.parametrize("value", ["[" * 100_000, '{"request_kind":' + "[" * 5000, "[1]", "3", "{"])
async def test_codex_metadata_that_is_none(rig: Rig, value: str) -> None:
    headers = {"x-codex-turn-metadata": value, "user-agent": "codex_cli_rs/1"}
    answer = await post(rig, "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}]}', **headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "tools",
    [
        "3",
        "{}",
        '"x"',
        "[3]",
        "[null]",
        "[[]]",
        '[{"type": {"x": 1}, "name": []}]',
        '[{"functionDeclarations": 3}]',
        '[{"functionDeclarations": [3]}]',
    ],
)
@pytest.mark.parametrize("agent", ["opencode/1", "claude-cli/2"])
async def test_tools_that_are_none(rig: Rig, path: str, tools: str, agent: str) -> None:
    said = '"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "contents": [{"parts": [{"text": "x"}]}]'
    answer = await post(rig, path, f'{{{said}, "max_tokens": 4, "tools": {tools}}}'.encode(), **{"user-agent": agent})
    assert answer.status_code < 500 and answer.json()


@pytest.mark.parametrize("choice", ['"auto"', "3", "[]", '{"type": []}', '{"name": {}}'])
async def test_choices_that_are_none(rig: Rig, choice: str) -> None:
    said = '"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "contents": [{"parts": [{"text": "x"}]}]'
    for path in ROUTES:
        chosen = f'"tool_choice": {choice}, "toolConfig": {{"functionCallingConfig": {{"mode": {choice}}}}}'
        answer = await post(rig, path, f'{{{said}, "max_tokens": 4, "tools": [], {chosen}}}'.encode())
        assert answer.status_code < 500 and answer.json()


async def test_a_request_that_cannot_be_judged(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours has the shape of an error of the dialect too, and says nothing of what is inside."""

    def fail(self: object, body: object) -> None:
        raise RuntimeError("internals")

    for path, kind in (("/v1/chat/completions", Chat), ("/v1/messages", Messages)):
        monkeypatch.setattr(kind, "adapt", fail)
        answer = await post(rig, path, b'{"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}')
        assert answer.status_code == 500 and answer.headers["x-request-id"] in answer.text and "internals" not in answer.text
        assert answer.json()["error"]["message"] and rig.edge.live("g1-0.0") == 0
