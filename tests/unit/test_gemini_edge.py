"""The Gemini dialect at the edge: who may call, and in which words it is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge_ray.config import Limits
from forge_ray.serve_proxy.admission import Admission
from forge_ray.serve_proxy.dialects.base import Overflow, Refusal
from forge_ray.serve_proxy.dialects.gemini import Gemini
from tests.unit.edge_app import WINDOW, Rig
from tests.unit.test_edge_wire import WAIT_S, serve, until

PATH = "/v1beta/models/policy:generateContent"
HI: dict[str, Any] = {"contents": [{"parts": [{"text": "hi"}]}]}
EVENTS = "streamGenerateContent?alt=sse"
METHODS = pytest.mark.parametrize("method", ["generateContent", EVENTS, "streamGenerateContent"])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.log.close()


async def post(rig: Rig, path: str = PATH, body: Any = HI, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.edge), base_url="http://proxy") as http:
        return await http.post(path, json=body, **options)


@pytest.mark.parametrize("version", ["v1beta", "v1", "v1alpha"])
@pytest.mark.parametrize("model", ["policy", "openai/policy"])
async def test_a_session_comes_by_prefix_or_by_key(rig: Rig, version: str, model: str) -> None:
    token, path = rig.token("g"), f"/{version}/models/{model}:generateContent"
    for answer in (
        await post(rig, f"/s/{token}{path}"),
        await post(rig, path, headers={"x-goog-api-key": token}),
        await post(rig, f"{path}?key={token}"),
    ):
        assert answer.status_code == 200, answer.text
        assert answer.json()["candidates"][0]["content"]["parts"] == [{"text": "hello"}]
    assert await rig.edge.drained("g", 60)
    calls = rig.read().session("g")
    assert [(call.dialect, call.kind, call.path, call.reply) for call in calls] == [("gemini", "agent", path, "answer")] * 3
    assert [request["model"] for request in rig.seen] == ["policy"] * 3


async def test_another_model_is_a_side_call_and_a_retry_supersedes(rig: Rig) -> None:
    for path in ("/v1beta/models/gemini-3.5-flash-lite:generateContent", PATH, PATH):
        assert (await post(rig, f"/s/{rig.token('g')}{path}")).status_code == 200
    assert await rig.edge.drained("g", 60)
    calls = rig.read().session("g")
    assert [(call.kind, call.model) for call in calls] == [("aux", "gemini-3.5-flash-lite"), ("agent", "policy"), ("agent", "policy")]
    # One body, but of the first the path says that it is another request.
    assert [call.superseded_by for call in calls] == [None, calls[2].id, None]


async def test_refusals_have_googles_shape(rig: Rig) -> None:
    token = rig.token("g")
    large = {"contents": [{"parts": [{"text": "x" * 2000}]}]}
    for status, word, answer in (
        (401, "UNAUTHENTICATED", await post(rig)),
        (401, "UNAUTHENTICATED", await post(rig, "/s/nobody" + PATH)),
        (404, "NOT_FOUND", await post(rig, f"/s/{token}/v1beta/models/policy:embedContent")),
        (413, "INVALID_ARGUMENT", await post(rig, f"/s/{token}{PATH}", large)),
        (415, "INVALID_ARGUMENT", await post(rig, f"/s/{token}{PATH}", headers={"content-encoding": "gzip"})),
        (400, "INVALID_ARGUMENT", await post(rig, f"/s/{token}{PATH}", [1])),
        (400, "INVALID_ARGUMENT", await post(rig, f"/s/{token}{PATH}", {"contents": []})),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["status"]) == (status, status, word), answer.text
        assert error["message"] and error["details"][0]["requestId"] == answer.headers["x-request-id"]
    rig.index.close("g")
    closed = await post(rig, f"/s/{token}{PATH}")
    assert (closed.status_code, closed.json()["error"]["status"]) == (403, "PERMISSION_DENIED")
    assert rig.read().session("g") == []


@pytest.mark.parametrize(
    ("status", "word"),
    [(429, "RESOURCE_EXHAUSTED"), (500, "INTERNAL"), (502, "INTERNAL"), (503, "UNAVAILABLE"), (504, "DEADLINE_EXCEEDED")],
)
def test_statuses(status: int, word: str) -> None:
    error = Gemini().error(Refusal(status, "m", retry_after_s=7), "req_1")["error"]
    assert (error["code"], error["status"]) == (status, word)
    retry = [detail["retryDelay"] for detail in error["details"] if detail["@type"].endswith("RetryInfo")]
    assert retry == (["7s"] if status in (429, 503) else [])


def test_an_overflow_has_the_words_that_clients_know() -> None:
    assert (
        Gemini().overflow(Overflow(WINDOW, 99)).message == "The input token count (99) exceeds the maximum number of tokens allowed (64)."
    )
    assert "exceeds the maximum number of tokens" in Gemini().overflow(Overflow(WINDOW)).message


def below(rig: Rig, method: str) -> str:
    return f"/s/{rig.token('g')}/v1beta/models/policy:{method}"


def come_again(error: dict[str, Any], status: str) -> str:
    """The seconds that a refusal for now names, in its text as in its details."""
    (seconds,) = [detail["retryDelay"].removesuffix("s") for detail in error["details"] if detail["@type"].endswith("RetryInfo")]
    assert error["status"] == status and f"retry-after: {seconds}" in error["message"]
    return seconds


@METHODS
async def test_who_is_turned_away_is_told_when_to_come_again(tmp_path: Path, method: str) -> None:
    rig = Rig(tmp_path, admission=Admission(1, 0))
    rig.admission.pause()
    waiting = asyncio.create_task(post(rig, below(rig, method)))
    await until(lambda: rig.admission.waiting == 1)
    busy = await post(rig, below(rig, method))
    assert busy.status_code == 429 and come_again(busy.json()["error"], "RESOURCE_EXHAUSTED") == busy.headers["retry-after"]
    rig.admission.resume()
    assert (await waiting).status_code == 200 and await rig.edge.drained("g", WAIT_S)
    assert [event["reason"] for event in rig.events("refused")] == ["busy"] and rig.read().session("g")[0].trainable
    rig.log.close()


@METHODS
async def test_an_update_that_takes_too_long(tmp_path: Path, method: str) -> None:
    """503; where the stream has spoken to stay alive, its last event. An array of responses has no such words, so it keeps silent."""
    rig = Rig(tmp_path, admission=Admission(4, 4, 1.0), keepalive_s=0.1)
    async with serve(rig.edge) as url, httpx.AsyncClient(timeout=WAIT_S) as http:
        rig.admission.pause()
        answer = await http.post(url + below(rig, method), json=HI)
        if method == EVENTS:
            assert answer.status_code == 200 and answer.text.startswith(": keep-alive\n\n")
            error = json.loads(answer.text.rstrip().rpartition("data: ")[2])["error"]
        else:
            assert answer.status_code == 503
            error = answer.json()["error"]
        assert (error["code"], come_again(error, "UNAVAILABLE")) == (503, "5")
        assert await rig.edge.drained("g", WAIT_S)
        assert [event["reason"] for event in rig.events("refused")] == ["paused"] and not rig.events("open")
    rig.log.close()


@METHODS
@pytest.mark.parametrize(("limit", "calls"), [("calls", 1), ("context", 0)])
async def test_a_limit_of_the_session_has_the_words_of_an_overflow(tmp_path: Path, method: str, limit: str, calls: int) -> None:
    rig = Rig(tmp_path, Limits(calls=1) if calls else Limits(context_tokens=3))
    for _ in range(calls):
        assert (await post(rig, below(rig, method))).status_code == 200
    answer = await post(rig, below(rig, method))
    error = answer.json()["error"]
    assert (answer.status_code, error["status"]) == (400, "INVALID_ARGUMENT")
    assert "exceeds the maximum number of tokens" in error["message"] and "the session's limit of" in error["message"]
    state = rig.read().state("g")
    assert (state.limit, state.calls, state.refused_for) == (limit, calls, {"limit": 1})
    rig.log.close()
