"""Other models behind the edge, over real connections: what crosses, what does not, and what the log has of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge_ray.config import Config, Limits, Train
from forge_ray.errors import UserError
from forge_ray.serve_proxy.client import merge
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.serve_proxy.upstream_routes import Keys, Targets
from forge_ray.trajectories import batch
from tests.unit.edge_app import Rig
from tests.unit.making import make_record
from tests.unit.test_edge_wire import WAIT_S, until
from tests.unit.upstream_app import KEY, Other, behind, config_of, sse

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "judge-1", "messages": [{"role": "user", "content": "is it right? ü"}]}


def chunk(finish: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]}


def score(token: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"content": [{"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": [], **more}]}


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    return {"index": index, **({"id": more["id"]} if "id" in more else {}), "function": {"arguments": arguments, "name": more.get("name")}}


STREAM = [
    *sse(chunk(role="assistant", content=""), chunk(reasoning_content="Let me "), chunk(reasoning="see.")),
    *sse(chunk(content="Ye", logprobs=score("Ye", -0.25)), chunk(content="s\n", logprobs=score("s\n", -0.5))),
    *sse(
        chunk(tool_calls=[call(0, '{"a": ', id="c1", name="look")]), chunk(tool_calls=[call(0, "1}"), call(1, "{}", id="c2", name="nod")])
    ),
    *sse(chunk("tool_calls"), {"choices": [], "usage": {"total_tokens": 9}}),
    b"data: [DONE]\n\n",
]


async def ask(rig: Rig, url: str, path: str = CHAT, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answer = await http.post(url + path, json=ASK | body, headers=headers)
    assert await rig.edge.drained("g1-0.0", WAIT_S)
    return answer


async def test_a_stream_passes_as_it_comes_and_its_end_only_after_it_is_on_disk(tmp_path: Path) -> None:
    other = Other([*STREAM[:4], None, *STREAM[4:]])
    async with behind(tmp_path, other) as (rig, url), httpx.AsyncClient(timeout=WAIT_S) as http:
        async with http.stream("POST", url + CHAT, json=ASK | {"stream": True}) as answer:
            got = b""
            pieces = answer.aiter_raw()
            while b"".join(STREAM[:4]) != got:
                got += await anext(pieces)
            assert rig.events() == []  # all of what has come has passed, and the upstream has not ended
            other.gate.set()
            while b'finish_reason": "tool_calls' not in got:
                got += await anext(pieces)
            assert [event["event"] for event in rig.events()][:1] == ["upstream"]
            got += b"".join([piece async for piece in pieces])
        assert got == b"".join(STREAM) and answer.headers["content-type"] == other.kind
        assert await rig.edge.drained("g1-0.0", WAIT_S)
        (one,) = rig.read().upstream("g1-0.0")
        assert (one.upstream, one.model, one.dialect, one.streamed, one.kind) == ("judge*", "judge-1", "chat", True, "agent")
        assert (one.status, one.http_status, one.delivered, one.error, one.usage) == ("finished", 200, True, None, {"total_tokens": 9})
        assert one.request == ASK | {"stream": True}
        assert one.reply == {
            "text": "Yes\n",
            "reasoning": "Let me see.",
            "tool_calls": [{"id": "c1", "name": "look", "arguments": '{"a": 1}'}, {"id": "c2", "name": "nod", "arguments": "{}"}],
            "finish_reason": "tool_calls",
        }
        assert one.logprobs == {"tokens": ["Ye", "s\n"], "logprobs": [-0.25, -0.5]}
        # Nothing of it is a call of the policy, and its admission and counters do not know of it.
        assert rig.read().session("g1-0.0") == [] and rig.seen == []
        counts = rig.index.state("g1-0.0").counts["r0"]
        assert (counts.upstream, counts.started, counts.calls, counts.last_status, counts.last_reply) == (1, 0, 0, "finished", "tool_calls")


async def test_what_crosses_and_what_stays(tmp_path: Path) -> None:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}]}
    other = Other([json.dumps(body).encode()], kind="application/json", headers={"set-cookie": "a=b", "x-seen": KEY, "x-request-id": "r9"})
    async with behind(tmp_path, other, model="grand-judge", headers={"X-Team": "a"}) as (rig, url):
        token = rig.token()
        secret = {
            "authorization": f"Bearer {token}",
            "x-api-key": token,
            "cookie": f"s={token}",
            "x-session": token,
            "user-agent": "prog/1",
        }
        answer = await ask(rig, url, f"{CHAT}?key={token}&beta=true", headers=secret)
        assert answer.status_code == 200 and answer.content == other.pieces[0]
        assert {"set-cookie", "x-seen"}.isdisjoint(answer.headers) and answer.headers["x-request-id"] == "r9"
        (seen,) = other.seen_headers
        assert (seen["authorization"], seen["user-agent"], seen["x-team"]) == (f"Bearer {KEY}", "prog/1", "a")
        assert token not in str(seen) and token not in other.urls[0] and other.urls[0].endswith("/v1/chat/completions?beta=true")
        assert other.asked == [ASK | {"model": "grand-judge", "logprobs": True}]
        (one,) = rig.read().upstream("g1-0.0")
        assert one.request == ASK and one.reply["text"] == "fine" and one.logprobs is None
        everything = rig.log.path.read_text()
        assert KEY not in everything and token not in everything


async def test_a_body_that_needs_no_change_crosses_byte_for_byte(tmp_path: Path) -> None:
    other = Other([b'{"choices": [] }'], kind="application/json")
    async with behind(tmp_path, other, logprobs=False) as (rig, url), httpx.AsyncClient(timeout=WAIT_S) as http:
        raw = b'{"messages":[ ] , "model" : "judge", "n": 2, "odd": 1.50}'
        answer = await http.post(url + CHAT, content=raw)
        assert other.raw == [raw] and answer.content == b'{"choices": [] }'
        assert await rig.edge.drained("g1-0.0", WAIT_S)
        (one,) = rig.read().upstream("g1-0.0")
        assert (one.status, one.error, one.delivered) == ("failed", "the reply ended before its proper end", False)


@pytest.mark.parametrize(("status", "after"), [(429, "2"), (400, None), (500, None)])
async def test_an_error_of_the_upstream_is_passed_on_without_its_key(tmp_path: Path, status: int, after: str | None) -> None:
    other = Other([f'{{"error": {{"message": "no, {KEY}"}}}}'.encode()], status=status, kind="application/json")
    async with behind(tmp_path, other) as (rig, url):
        answer = await ask(rig, url)
        assert (answer.status_code, answer.json()) == (status, {"error": {"message": "no, ***"}})
        assert answer.headers.get("retry-after") == after
        (one,) = rig.read().upstream("g1-0.0")
        assert (one.status, one.http_status, one.error, one.delivered) == ("failed", status, "no, ***", False)


async def test_no_answer_is_502_or_504_in_the_dialects_shape(tmp_path: Path) -> None:
    other = Other([None])
    async with behind(tmp_path, other, timeout_s=1, dialects=["chat", "messages"]) as (rig, url):
        other.pieces, other.kind = [], "application/json"
        other.status, other.headers = 307, {"location": "http://127.0.0.1:9/x"}
        answer = await ask(rig, url, "/v1/messages", max_tokens=5)
        assert answer.status_code == 502 and answer.json()["type"] == "error" and "location" not in answer.headers
        assert answer.headers["retry-after"] == "2"
        other.status, other.silent = 200, True
        answer = await ask(rig, url)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "upstream_error" and "retry-after" in answer.headers
        other.gate.set()
        assert [(one.status, one.http_status) for one in rig.read().upstream("g1-0.0")] == [("failed", 502), ("failed", 504)]
    gone = Rig(tmp_path / "gone", targets=Targets(config_of({"judge": {"url": "http://127.0.0.1:9/v1"}})))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gone.edge), timeout=WAIT_S) as http:
        answer = await http.post(f"http://x/s/{gone.token()}{CHAT}", json=ASK | {"model": "judge"})
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "upstream_error"
    (one,) = gone.read().upstream("g1-0.0")
    assert (one.status, one.http_status, one.reply) == ("failed", 502, {})
    gone.log.close()


async def test_silence_within_a_reply_is_a_cut(tmp_path: Path) -> None:
    other = Other([STREAM[3], None])
    async with behind(tmp_path, other, timeout_s=1) as (rig, url), httpx.AsyncClient(timeout=WAIT_S) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            async with http.stream("POST", url + CHAT, json=ASK | {"stream": True}) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_raw():
                    pass
        assert await rig.edge.drained("g1-0.0", WAIT_S)
        (one,) = rig.read().upstream("g1-0.0")
        assert (one.status, one.http_status, one.delivered, one.reply["text"]) == ("failed", 504, False, "Ye")
        other.gate.set()


async def test_a_cut_stream_is_cut_for_the_harness_too(tmp_path: Path) -> None:
    async with behind(tmp_path, Other([STREAM[3], RuntimeError("out of memory")])) as (rig, url), httpx.AsyncClient(timeout=WAIT_S) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(url + CHAT, json=ASK | {"stream": True})
        assert await rig.edge.drained("g1-0.0", WAIT_S)
        (one,) = rig.read().upstream("g1-0.0")
        assert (one.status, one.http_status, one.delivered, one.reply["text"]) == ("failed", 502, False, "Ye")


@pytest.mark.parametrize("who", ["harness", "session"])
async def test_whoever_leaves_the_upstream_is_left_too(tmp_path: Path, who: str) -> None:
    other = Other([STREAM[3], None])
    async with behind(tmp_path, other) as (rig, url), httpx.AsyncClient(timeout=WAIT_S) as http:
        async with http.stream("POST", url + CHAT, json=ASK | {"stream": True}) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            if who == "session":
                assert rig.edge.abort("g1-0.0") == 1
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(pieces)
        await asyncio.wait_for(other.left.wait(), WAIT_S)
        assert await rig.edge.drained("g1-0.0", WAIT_S)
        (one,) = rig.read().upstream("g1-0.0")
        assert (one.status, one.delivered, one.reply["text"]) == ("cancelled", False, "Ye")
        await until(lambda: not rig.edge.under_way)


async def test_a_closed_session_gets_an_answer_where_none_has_begun(tmp_path: Path) -> None:
    other = Other(silent=True)
    async with behind(tmp_path, other) as (rig, url):
        asking = asyncio.create_task(ask(rig, url))
        await until(lambda: bool(other.asked))
        assert rig.edge.abort("g1-0.0") == 1
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "session_closed")
        other.gate.set()


async def test_a_dialect_that_the_upstream_does_not_speak_is_refused_by_name(tmp_path: Path) -> None:
    async with behind(tmp_path, Other()) as (rig, url):
        answer = await ask(rig, url, "/v1/messages", max_tokens=9)
        assert answer.status_code == 400 and "does not speak the messages dialect" in answer.json()["error"]["message"]
        gemini = await ask(rig, url, "/v1beta/models/judge-1:generateContent", contents=[{"parts": [{"text": "hi"}]}])
        assert gemini.status_code == 400 and "gemini dialect" in gemini.json()["error"]["message"]
        assert rig.read().upstream("g1-0.0") == [] and rig.seen == []
        # Another name is a side call of the policy's, as ever; so is the policy's own, whatever the patterns are.
        assert (await ask(rig, url, model="another")).status_code == 200
        assert [context.kind for context in rig.contexts] == ["aux"]


async def test_the_log_grows_with_what_is_new(tmp_path: Path) -> None:
    body = {"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}]}
    other = Other([json.dumps(body).encode()], kind="application/json")
    async with behind(tmp_path, other) as (rig, url):
        messages: list[Any] = [{"role": "system", "content": "long " * 20}, {"role": "user", "content": "a"}]
        sent = []
        for turn in range(3):
            sent.append(ASK | {"messages": list(messages), **({"tools": [{"type": "function"}], "x": 1} if turn < 2 else {"stop": "b"})})
            await ask(rig, url, **sent[-1])
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"turn {turn}"}]
        assert [one.request for one in rig.read().upstream("g1-0.0")] == [sent[0], sent[1], sent[2]]
        events = rig.events("upstream")
        assert [event["shared"] for event in events] == [0, 2, 4] and events[1]["request"] == {"messages": sent[1]["messages"][2:]}
        assert (events[2]["dropped"], events[2]["request"].keys()) == (["tools", "x"], {"stop", "messages"})
        # A replica that takes over knows nothing of earlier ones and writes the whole request; both are read alike.
        rig.edge.forget("g1-0.0")
        await ask(rig, url, **sent[0])
        assert rig.events("upstream")[3]["parent"] is None and rig.read().upstream("g1-0.0")[3].request == sent[0]


async def test_no_token_of_another_model_is_in_a_step_batch(tmp_path: Path) -> None:
    other = Other(STREAM)
    async with behind(tmp_path, other) as (rig, url):
        await ask(rig, url, stream=True)
        await ask(rig, url, model="policy")
        await ask(rig, url, stream=True)
        calls = rig.read().session("g1-0.0")
        assert len(rig.read().upstream("g1-0.0")) == 2 and len(calls) == 1
        # The other model does not say how the rollout ended.
        counts = rig.index.state("g1-0.0").counts["r0"]
        assert (counts.calls, counts.upstream, counts.last_reply, counts.last_kind) == (1, 2, "answer", "agent")
    groups = [
        [(make_record("g1-0.0" if number else "g1-1.0", reward), calls if number else []) for number, reward in enumerate((0.0, 1.0))]
    ]
    built = batch.build_step(groups, Train(), version=1)
    (row,) = built.table.to_pylist()
    assert row["ids"] == [1, 2, 3, 11, 12, 13] and row["mask"] == [False] * 3 + [True] * 3
    assert (built.stats["calls"], built.stats["tokens_trained"]) == (1, 3)


async def test_a_replica_that_takes_over_knows_how_the_teachers_rollout_stood(tmp_path: Path) -> None:
    async with behind(tmp_path, Other(STREAM)) as (rig, url):
        await ask(rig, url, stream=True)
        state = rig.read().state("g1-0.0")
    successor = SessionIndex("r1", Limits())
    for _ in range(2):
        successor.restore("g1-0.0", [], closed=False, limit=None, refused_by=state.refused_by, upstream=state.upstream)
    summary = merge("g1-0.0", [{"replica": "r1", **successor.state("g1-0.0").report()}])
    assert (summary.upstream, summary.calls, summary.failed, summary.last_status, summary.last_reply) == (1, 0, 0, "finished", "tool_calls")


def test_keys_come_from_the_environment_and_show_nowhere(tmp_path: Path) -> None:
    config = config_of({"teacher": {"url": "https://api.example.com/v1", "key_env": "TEACHER_KEY"}, "j": {"url": "http://h"}})
    with pytest.raises(UserError, match=r"\$TEACHER_KEY is not set"):
        Keys.of(config, {})
    keys = Keys.of(config, {"TEACHER_KEY": KEY})
    assert keys.get("teacher") == KEY and KEY not in repr(keys) and keys.get("j") is None
    assert KEY not in config.model_dump_json()


def test_a_name_a_pattern_and_the_policys_own_name() -> None:
    config = config_of({"*": {"url": "http://all"}, "gpt-*": {"url": "http://gpt"}})
    assert [config.upstream(name) for name in ("gpt-5", "policy", "openai/policy", "x")] == ["*", None, None, "*"]
    assert config_of({"gpt-*": {"url": "http://gpt"}}).upstream("gpt4") is None
    with pytest.raises(ValueError, match="policy's own name"):
        config_of({"policy": {"url": "http://x"}})
    with pytest.raises(ValueError, match="url"):
        config_of({"x": {"url": "api.example.com"}})


def test_a_harness_of_another_model_is_not_trained() -> None:
    from forge_ray.job.scheduler import Scheduler, TaskRef

    upstreams = {"teacher": {"url": "http://x"}}
    config = config_of(
        upstreams, harnesses=[{"name": "react", "model": "teacher"}, {"name": "codex"}, {"name": "qwen_code", "model": "side"}]
    )
    assert [config.taught(harness) for harness in config.harnesses] == [True, False, False]
    scheduler = Scheduler(config, [TaskRef("t", "/t")])
    scheduler.admit_group()
    scheduler.admit_group()
    assert {request.harness for request in scheduler.launchable(99)} == {"codex", "qwen_code"}


def test_check_says_which_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_ray.cli import check_config

    config: Config = config_of({"teacher": {"url": "http://x/v1", "key_env": "NO_SUCH_KEY"}})
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (found,) = check_config.upstreams(config)
    assert (found.ok, found.topic, found.state) == (False, "proxy.upstreams.teacher.key_env", "$NO_SUCH_KEY is not set")
    monkeypatch.setenv("NO_SUCH_KEY", KEY)
    (found,) = check_config.upstreams(config)
    assert found.ok and KEY not in str(found)
