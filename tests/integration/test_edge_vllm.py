"""The edge over vLLM's real app and the scripted engine: requests of real harnesses pass, errors are what official clients know."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.integration.edge_rig import STRICT, WINDOW, EdgeRig, edge_rig
from tests.integration.requests_of_harnesses import CLAUDE_HEADERS, CODEX_HEADERS, claude_code, codex

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def _call(name: str, **arguments: Any) -> str:
    return f"I do it.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


RULES: list[dict[str, Any]] = [
    {"if": "word codex", "turn": 0, "say": _call("exec_command", cmd="echo -n codex > out.txt")},
    {"if": "word claude", "turn": 0, "say": _call("Bash", command="echo -n claude > out.txt")},
    {"if": "engine fails", "say": "a few words of it", "fault": "fail", "after": 0},
    {"if": "fails later", "say": "a few words of it", "fault": "fail", "after": 2},
    {"if": "say one", "say": "one"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeRig]:
    async with edge_rig(tmp_path_factory.mktemp("edge"), RULES) as rig:
        yield rig


def openai_client(rig: EdgeRig, session: str) -> openai.AsyncOpenAI:
    http: Any = rig.http()
    return openai.AsyncOpenAI(base_url=f"{rig.base(session)}/v1", api_key="x", http_client=http, max_retries=0)


def anthropic_client(rig: EdgeRig, session: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=rig.base(session), api_key="x", http_client=rig.http2(), max_retries=0)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_a_rollout_of_codex(rig: EdgeRig) -> None:
    first = await rig.post("codex", RESPONSES, codex(), CODEX_HEADERS)
    assert first.status_code == 200, first.text
    done = next(event for event in events(first.text) if event["type"] == "response.completed")["response"]
    called = next(item for item in done["output"] if item["type"] == "function_call")
    assert called["name"] == "exec_command" and json.loads(called["arguments"]) == {"cmd": "echo -n codex > out.txt"}
    back = [
        *done["output"],
        {"type": "function_call_output", "call_id": called["call_id"], "output": "Exit code: 0\nOutput:\n"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_p", "name": "apply_patch", "input": "*** Begin Patch\n*** End Patch"},
        {"type": "custom_tool_call_output", "call_id": "call_p", "output": "Success"},
        {
            "type": "function_call",
            "id": "fc_9",
            "call_id": "call_s",
            "name": "spawn_agent",
            "namespace": "multi_agent_v1",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "call_s", "output": "no agents left"},
    ]
    second = await rig.post("codex", RESPONSES, codex(*back), CODEX_HEADERS)
    assert second.status_code == 200, second.text
    one, two = rig.calls("codex")
    assert (one.reply, two.reply, one.kind, two.kind) == ("tool_calls", "answer", "agent", "agent")
    assert one.trainable and two.trainable and one.conversation == two.conversation == "019c0000-aaaa"
    for word in ("exec_command", "spawn_agent", "apply_patch", "danger-full-access"):
        assert word in rig.prompt(one), word
    for word in ("Exit code: 0", "Begin Patch", "no agents left"):
        assert word in rig.prompt(two), word
    assert two.parent == one.id and two.shared >= len(one.prompt_ids)


async def test_a_subagent_and_a_compaction_of_codex(rig: EdgeRig) -> None:
    spawned = CODEX_HEADERS | {"thread-id": "t2", "x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "019c0000-aaaa"}
    compact = CODEX_HEADERS | {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
    assert (await rig.post("codex-kinds", RESPONSES, codex(), spawned)).status_code == 200
    assert (await rig.post("codex-kinds", RESPONSES, {**codex(), "tools": []}, compact)).status_code == 200
    assert [(call.kind, call.conversation) for call in rig.calls("codex-kinds")] == [("subagent", "t2"), ("compaction", "019c0000-aaaa")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 31999}, {"type": "disabled"}])
async def test_a_rollout_of_claude_code(rig: EdgeRig, stream: bool, thinking: dict[str, Any]) -> None:
    session = f"claude-{stream}-{thinking['type']}"
    changes: dict[str, Any] = {"thinking": thinking, "stream": stream}
    first = await rig.post(session, f"{MESSAGES}?beta=true", claude_code(**changes), CLAUDE_HEADERS)
    assert first.status_code == 200, first.text
    (one,) = rig.calls(session)
    if stream:
        found = events(first.text)
        start = found[0]["message"]["usage"]
        tool = next(
            event["content_block"]
            for event in found
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use"
        )
        tool["input"] = json.loads("".join(e["delta"].get("partial_json", "") for e in found if e["type"] == "content_block_delta"))
    else:
        start = first.json()["usage"]
        tool = next(block for block in first.json()["content"] if block["type"] == "tool_use")
    # Claude Code's context meter and its compaction read this number.
    assert start["input_tokens"] + start.get("cache_read_input_tokens", 0) + start.get("cache_creation_input_tokens", 0) == len(
        one.prompt_ids
    )
    assert tool["input"] == {"command": "echo -n claude > out.txt"}
    later = [
        {"role": "assistant", "content": [{"type": "text", "text": "I do it."}, tool]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": tool["id"], "content": "done", "is_error": False}]},
        {"role": "system", "content": "reminder 2"},
    ]
    second = await rig.post(session, f"{MESSAGES}?beta=true", claude_code(*later, nonce="0aaa9", **changes), CLAUDE_HEADERS)
    assert second.status_code == 200, second.text
    one, two = rig.calls(session)
    assert (one.reply, two.reply, one.max_tokens) == ("tool_calls", "answer", WINDOW - len(one.prompt_ids))
    assert one.trainable and two.trainable
    prompt = rig.prompt(two)
    assert "x-anthropic-billing-header" not in prompt
    assert (
        prompt.index("You are Claude Code")
        < prompt.index("word claude")
        < prompt.index("Available agent types")
        < prompt.index("reminder 2")
    )
    # The reminders stand where the harness put them, so the second call continues the first.
    assert two.parent == one.id and two.shared >= len(one.prompt_ids)


async def test_side_calls_of_claude_code(rig: EdgeRig) -> None:
    assert (await rig.post("claude-side", MESSAGES, claude_code(model="claude-haiku-4-5-20251001"), CLAUDE_HEADERS)).status_code == 200
    agent = CLAUDE_HEADERS | {"x-claude-code-agent-id": "a7"}
    assert (await rig.post("claude-side", MESSAGES, claude_code(nonce="1"), agent)).status_code == 200
    assert [call.kind for call in rig.calls("claude-side")] == ["aux", "subagent"]
    count = {name: value for name, value in claude_code().items() if name in ("model", "messages", "system", "tools")}
    answer = await rig.post("claude-side", f"{MESSAGES}/count_tokens?beta=true", count, CLAUDE_HEADERS)
    assert answer.status_code == 200 and answer.json()["input_tokens"] == len(rig.calls("claude-side")[0].prompt_ids)
    assert len(rig.calls("claude-side")) == 2


async def test_a_template_that_takes_system_first_only(tmp_path: Path) -> None:
    async with edge_rig(tmp_path, RULES, template=STRICT) as strict:
        assert (await strict.post("s", MESSAGES, claude_code(), CLAUDE_HEADERS)).status_code == 200
        chat = {"model": "policy", "messages": [{"role": "user", "content": "u"}, {"role": "system", "content": "late"}]}
        refused = await strict.post("s", CHAT, chat)
        assert refused.status_code == 400 and "system first" in refused.json()["error"]["message"]
        state = strict.reader().state("s")
        assert (state.calls, state.refused, state.failed) == (1, 1, 0)


ASSISTANT = {"role": "assistant", "content": [{"type": "output_text", "text": "one"}]}
EMPTY: dict[str, Any] = {"role": "assistant", "content": []}
HISTORIES: list[list[dict[str, Any]]] = [
    [ASSISTANT, EMPTY],
    [{"type": "message", **ASSISTANT}, {"type": "message", **EMPTY}],
    [{"type": "reasoning", "summary": []}, ASSISTANT],
    [{"type": "message", "id": None, "status": None, "role": "assistant", "content": [{"type": "output_text", "text": "one"}]}],
    [
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": ""},
    ],
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", range(len(HISTORIES)))
async def test_assistant_items_come_back_incomplete(rig: EdgeRig, number: int, stream: bool) -> None:
    session, history = f"items-{number}-{stream}", HISTORIES[number]
    user = {"role": "user", "content": [{"type": "input_text", "text": "say one"}]}
    body = {"model": "policy", "max_output_tokens": 8, "stream": stream}
    assert (await rig.post(session, RESPONSES, {**body, "input": [user]})).status_code == 200
    second = await rig.post(session, RESPONSES, {**body, "input": [user, *history, user]})
    assert second.status_code == 200, second.text
    one, two = rig.calls(session)
    assert two.parent == one.id and rig.prompt(two).count("\none<|im_end|>") == 1 and two.conversation == one.conversation


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "say one"}], "tools": [], "tool_choice": "auto"}),
        (CHAT, {"messages": [{"role": "user", "content": "say one"}, {"role": "developer", "content": "be brief"}]}),
        (RESPONSES, {"input": [{"role": "user", "content": "say one"}, {"role": "developer", "content": "be brief"}], "tools": []}),
        ("/v1/completions", {"prompt": "say one", "max_tokens": 4}),
        ("/v1/completions", {"prompt": [65, 66, 67], "max_tokens": 4}),
    ],
)
async def test_odd_but_valid_requests(rig: EdgeRig, path: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = await rig.post("odd", path, {"model": "whatever", "stream": stream, **body})
        assert answer.status_code == 200, answer.text


LONG = "word " * (2 * WINDOW)


@pytest.mark.parametrize("stream", [False, True])
async def test_overflow_as_official_clients_see_it(rig: EdgeRig, stream: bool) -> None:
    api, claude = openai_client(rig, "long"), anthropic_client(rig, "long")
    user: list[Any] = [{"role": "user", "content": LONG}]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as chat:
        await api.chat.completions.create(model="policy", messages=user, stream=stream)
    with pytest.raises(openai.BadRequestError, match="maximum context length") as responses:
        await api.responses.create(model="policy", input=LONG, stream=stream)
    with pytest.raises(openai.BadRequestError, match="maximum context length") as completions:
        await api.completions.create(model="policy", prompt=LONG, stream=stream)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await claude.messages.create(model="policy", messages=user, max_tokens=32000, stream=stream)
    assert {error.value.code for error in (chat, responses, completions)} == {"context_length_exceeded"}
    state = rig.reader().state("long")
    assert (state.overflow, state.calls, state.limit) == (True, 0, None)


@pytest.mark.parametrize("text", ["engine fails", "fails later"])
async def test_engine_faults_as_official_clients_see_them(rig: EdgeRig, text: str) -> None:
    session = text.replace(" ", "-")
    api, claude = openai_client(rig, session), anthropic_client(rig, session)
    user: list[Any] = [{"role": "user", "content": text}]
    with pytest.raises(openai.InternalServerError, match="req_"):
        await api.chat.completions.create(model="policy", messages=user)
    with pytest.raises(openai.InternalServerError, match="req_"):
        await api.responses.create(model="policy", input=text)
    with pytest.raises(anthropic.InternalServerError, match="req_"):
        await claude.messages.create(model="policy", messages=user, max_tokens=8)
    assert await rig.edge.drained(session, 120)
    assert [(call.status, call.delivered, call.trainable) for call in rig.calls(session)] == [("failed", False, False)] * 3
    assert rig.reader().state(session).failed == 3


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_stream_that_fails_is_never_whole(rig: EdgeRig, path: str) -> None:
    body: dict[str, Any] = {"model": "policy", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "fails later"}]}
    if path == RESPONSES:
        body = {"model": "policy", "stream": True, "input": "fails later"}
    session = f"cut{path.replace('/', '-')}"
    try:
        answer = await rig.post(session, path, body)
    except Exception as error:  # the connection is cut, which this transport hands on as what the app raised
        assert "script" in str(error)
    else:
        assert "response.completed" not in answer.text and "message_stop" not in answer.text
    assert await rig.edge.drained(session, 120)
    (call,) = rig.calls(session)
    assert (call.status, call.delivered, len(call.ids)) == ("failed", False, 2)


async def test_official_clients_read_the_replies(rig: EdgeRig) -> None:
    api, claude = openai_client(rig, "clients"), anthropic_client(rig, "clients")
    user: list[Any] = [{"role": "user", "content": "say one"}]
    assert (await api.chat.completions.create(model="policy", messages=user)).choices[0].message.content == "one"
    assert (await api.responses.create(model="policy", input="say one")).output_text == "one"
    message = await claude.messages.create(model="policy", messages=user, max_tokens=8)
    assert [getattr(block, "text", None) for block in message.content] == ["one"]
    async with claude.messages.stream(model="policy", messages=user, max_tokens=7) as stream:
        assert await stream.get_final_text() == "one"
    async with api.responses.stream(model="policy", input="say one", max_output_tokens=7) as responses:
        assert (await responses.get_final_response()).output_text == "one"
    deltas = [chunk async for chunk in await api.chat.completions.create(model="policy", messages=user, max_tokens=7, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas if chunk.choices) == "one"
    cut = await api.responses.create(model="policy", input="say one", max_output_tokens=1)
    assert cut.status == "incomplete"
    assert await rig.edge.drained("clients", 120)
    calls = rig.calls("clients")
    assert all(call.trainable for call in calls) and [call.reply for call in calls] == ["answer"] * 6 + ["length"]


async def test_vllms_other_routes_are_closed(rig: EdgeRig) -> None:
    for path in (
        "/tokenize",
        "/detokenize",
        "/v1/load_lora_adapter",
        "/v1/chat/completions/render",
        "/inference/v1/generate",
        "/load",
        "/version",
    ):
        for method in ("GET", "POST"):
            async with rig.http() as http:
                assert (await http.request(method, rig.base("routes") + path, json={})).status_code == 404, path


async def test_a_growing_history_is_tokenised_from_where_it_grew(rig: EdgeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In three dialects, with a side conversation in between: the ids are those of the whole text, and only what is new was encoded."""
    assert rig.prompts is not None
    encoded: list[int] = []
    plan = rig.prompts.plan

    def watched(session: str, text: str) -> Any:
        made = plan(session, text)
        encoded.append(len(made.rest))
        return made

    monkeypatch.setattr(rig.prompts, "plan", watched)
    talks: dict[str, list[dict[str, Any]]] = {"main": [], "side": []}
    for turn in range(6):
        path, cap = ((CHAT, "max_tokens"), (MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens"))[turn % 3]
        for name, talk in talks.items():
            talk.append({"role": "user", "content": f"say one: {name} {turn} naïve 漢字 " + "and so on " * 30})
            answer = await rig.post("grows", path, {"model": "m", cap: 8, "input" if path == RESPONSES else "messages": talk})
            assert answer.status_code == 200, answer.text
            talk.append({"role": "assistant", "content": "one"})
    calls = rig.calls("grows")
    assert len(calls) == 12 and {call.splice for call in calls[2:]} == {"exact"}
    for call in calls:
        assert call.prompt_ids == rig.tokenizer.encode(rig.prompt(call), add_special_tokens=False)
    assert max(encoded[2:]) < 500 < len(rig.prompt(calls[-1]))
    rig.prompts.forget("grows")
