"""vLLM's real app behind the edge, over scripted tokens: each listed field, each kind of tool, each stream's order of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests import stream_checks
from tests.integration.edge_rig import WINDOW, EdgeRig, edge_rig
from tests.integration.requests_of_harnesses import CODEX_HEADERS, codex
from tests.tiny_model import TEMPLATE
from tests.unit.field_samples import BODIES, HONOURED, IGNORED, Json

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
THREE = ("chat", "responses", "messages")
PATCH = '*** Begin Patch\n*** Update File: "a b.py"\n@@\n-\tx = "\\u00e9"\n+\tx = "é 🚀 \\\\ \\/"\n*** End Patch\n'
ARGUMENTS = {"command": 'printf "%s\\n" "é 🚀" \\\n  | tee  out.txt'}
DRAFT = '<think>perhaps <tool_call>{"name":"bash","arguments":{"command":"touch BAD"}}</tool_call></think>'
REAL = '<tool_call>{"name":"bash","arguments":{"command":"ls"}}</tool_call>'


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


RULES: list[Json] = [
    {"if": "use the tool", "turn": 0, "say": "I do it.\n" + call("bash", ARGUMENTS)},
    {"if": "two at once", "turn": 0, "say": "Both.\n" + call("bash", ARGUMENTS) + "\n" + call("bash", {"command": "ls"})},
    {"if": "patch it", "turn": 0, "say": call("apply_patch", {"input": PATCH})},
    {"if": "spawn one", "turn": 0, "say": call("multi_agent_v1__spawn_agent", {"message": "write out.txt"})},
    {"if": "broken call", "turn": 0, "say": 'Here:\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"\n</tool_call>'},
    {"if": "text as arguments", "turn": 0, "say": call("bash", "ls -l")},
    {"if": "unknown tool", "turn": 0, "say": call("no_such_tool", {"a": 1})},
    {"if": "draft first", "turn": 0, "say": DRAFT + REAL},
    {"if": "think aloud", "turn": 0, "say": "<think>\nlet me see\n</think>\n\nthe answer"},
    {"if": "never closes", "turn": 0, "say": "<think>on and on " + REAL + " and on " * 30},
    {"if": "stop there", "turn": 0, "say": "ls\nObservation: x and more"},
    {"if": "engine fails", "say": "a few words", "fault": "fail", "after": 0},
    {"if": "long answer", "turn": 0, "say": "word " * 50},
    {"say": "one"},
]
TOOLS: dict[str, list[Json]] = {
    "chat": [
        {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
    ],
    "responses": [{"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}],
    "messages": [{"name": "bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}],
}
CLOSED = TEMPLATE.replace(
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}",
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% if closed %}<think>\n\n</think>\n\n{% endif %}{% endif -%}",
)
"""The template of a model whose thinking can be switched off by closing it in the prompt."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeRig]:
    async with edge_rig(tmp_path_factory.mktemp("dialects"), RULES) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeRig]:
    assert CLOSED != TEMPLATE
    directory = tmp_path_factory.mktemp("thinking")
    async with edge_rig(directory, RULES, template=CLOSED, server={"reasoning_parser": "deepseek_r1"}) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeRig]:
    """A replica with one place and no room to wait, whose sessions may have 200 tokens of context."""
    proxy = {"limits": {"context_tokens": 200}, "max_running": 1, "max_waiting": 0, "keepalive_s": 0.1, "max_pause_s": 60}
    async with edge_rig(tmp_path_factory.mktemp("tight"), RULES, proxy=proxy) as rig:
        yield rig


def request(name: str, text: str, *, stream: bool = False, declare: bool = True, **fields: Any) -> Json:
    user = [{"role": "user", "content": text}]
    body: Json = {"model": "policy", "stream": stream, **({"input": user} if name == "responses" else {"messages": user})}
    body |= {"max_tokens": 512} if name == "messages" else {}
    body |= {"stream_options": {"include_usage": True}} if stream and name == "chat" else {}
    return body | ({"tools": TOOLS[name]} if declare else {}) | fields


async def say(rig: EdgeRig, session: str, name: str, text: str, *, stream: bool = False, **fields: Any) -> Json:
    """The reply as `{"text", "thinking", "calls": [(id, name, arguments text)], "end", "usage", "body"}`, after the stream's checks."""
    answer = await rig.post(session, PATHS[name], request(name, text, stream=stream, **fields))
    assert answer.status_code == 200, answer.text
    if name == "responses":
        body = stream_checks.responses(answer.text) if stream else answer.json()
        return _responses(body)
    if name == "messages":
        body = stream_checks.messages(answer.text) if stream else answer.json()
        calls = [(b["id"], b["name"], json.dumps(b["input"])) for b in body["content"] if b["type"] == "tool_use"]
        parts = {kind: "".join(b[kind] for b in body["content"] if b["type"] == kind) for kind in ("text", "thinking")}
        return {**parts, "calls": calls, "end": body["stop_reason"], "usage": body["usage"], "body": body}
    body = stream_checks.chat(answer.text) if stream else answer.json()["choices"][0]
    usage = body.get("usage") or answer.json()["usage"]
    message = body["message"]
    functions = [(c["id"], c if stream else c["function"]) for c in message.get("tool_calls") or []]
    calls = [(number, function["name"], function["arguments"]) for number, function in functions]
    return {
        "text": message["content"] or "",
        "thinking": message.get("reasoning") or "",
        "calls": calls,
        "end": body["finish_reason"],
        "usage": usage,
        "body": body,
    }


def _responses(body: Json) -> Json:
    texts: dict[str, str] = {"message": "", "reasoning": ""}
    calls = []
    for item in body["output"]:
        if item["type"] in texts:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
        else:
            calls.append((item["call_id"], item["name"], item.get("arguments", item.get("input"))))
    end = "length" if body["status"] == "incomplete" else "stop"
    return {"text": texts["message"], "thinking": texts["reasoning"], "calls": calls, "end": end, "usage": body["usage"], "body": body}


# --- fields


def pairs(samples: dict[str, Json]) -> list[Any]:
    return [pytest.param(name, field, value, id=f"{name}-{field}") for name in samples for field, value in samples[name].items()]


@pytest.mark.parametrize(("name", "field", "value"), pairs(HONOURED) + pairs(IGNORED))
async def test_vllm_takes_every_field_that_is_not_refused(rig: EdgeRig, name: str, field: str, value: Json) -> None:
    answer = await rig.post(f"field-{name}-{field}", PATHS[name], BODIES[name] | value)
    assert answer.status_code == 200, answer.text
    (one,) = rig.calls(f"field-{name}-{field}")
    assert one.status in ("finished", "length") and one.delivered
    assert one.sampling["temperature"] == 1.0 and one.sampling["seed"] is None
    grammar = field in ("structured_outputs", "response_format", "text", "output_config")
    assert one.masked_by_grammar is grammar and one.trainable is not grammar


async def test_fields_that_are_honoured_act(rig: EdgeRig) -> None:
    """One effect of each that can be seen in the prompt, the record or the reply."""
    for name, limit in (
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("responses", "max_output_tokens"),
        ("messages", "max_tokens"),
    ):
        capped: Any = {limit: 3}
        cut = await say(rig, f"act-{limit}", name, "long answer", **capped)
        assert cut["end"] in ("length", "max_tokens") and len(rig.calls(f"act-{limit}")[-1].ids) == 3
    scored = await say(rig, "act", "chat", "hi", logprobs=True, top_logprobs=0)
    (one,) = rig.calls("act")
    assert [entry["logprob"] for entry in scored["body"]["logprobs"]["content"]] == pytest.approx(one.logprobs)
    listed = await say(rig, "act2", "responses", "hi", include=["message.output_text.logprobs"])
    assert len(listed["body"]["output"][0]["content"][0]["logprobs"]) == len(rig.calls("act2")[0].ids)
    await say(rig, "act3", "chat", "hi", tool_choice="none", chat_template_kwargs={"unknown": 1})
    await say(rig, "act3", "responses", "hi", instructions="be brief")
    await say(rig, "act3", "messages", "hi", system="be brief")
    prompts = [rig.prompt(found) for found in rig.calls("act3")]
    assert (
        "bash" in prompts[0]
        and prompts[1].startswith("<|im_start|>system\nbe brief")
        and prompts[2].startswith("<|im_start|>system\nbe brief")
    )
    one_of_two: list[Json] = [
        await say(rig, "act4", "chat", "two at once", parallel_tool_calls=False),
        await say(rig, "act4", "responses", "two at once", parallel_tool_calls=False, stream=True),
        await say(rig, "act4", "messages", "two at once", tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
    ]
    assert [len(reply["calls"]) for reply in one_of_two] == [1, 1, 1]
    assert not any(found.masked_by_grammar for found in rig.calls("act4"))


# --- tools


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THREE)
async def test_calls_in_parallel(rig: EdgeRig, name: str, stream: bool) -> None:
    reply = await say(rig, f"two-{name}-{stream}", name, "two at once", stream=stream)
    assert [(called, json.loads(arguments)) for _, called, arguments in reply["calls"]] == [
        ("bash", ARGUMENTS),
        ("bash", {"command": "ls"}),
    ]
    assert len({number for number, _, _ in reply["calls"]}) == 2 and reply["text"].strip() == "Both."
    (one,) = rig.calls(f"two-{name}-{stream}")
    assert one.reply == "tool_calls" and one.trainable and ARGUMENTS["command"].split()[0] in rig.tokenizer.decode(one.ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_goes_round(rig: EdgeRig, stream: bool) -> None:
    """The official client sees a `custom_tool_call` with the raw input, and its output is understood in the next request."""
    session = f"custom-{stream}"
    http: Any = rig.http()
    api = openai.AsyncOpenAI(base_url=f"{rig.base(session)}/v1", api_key="x", http_client=http, max_retries=0)
    tools: Any = codex()["tools"]
    user: Any = {"role": "user", "content": "patch it"}
    if stream:
        async with api.responses.stream(model="policy", input=[user], tools=tools) as events:
            kinds = [event.type async for event in events]
            first: Any = await events.get_final_response()
        assert "response.custom_tool_call_input.delta" in kinds and "response.custom_tool_call_input.done" in kinds
    else:
        first = await api.responses.create(model="policy", input=[user], tools=tools)
    (item,) = [item for item in first.output if item.type == "custom_tool_call"]
    assert (item.name, item.input) == ("apply_patch", PATCH)
    back: Any = [user, *[found.model_dump(exclude_none=True) for found in first.output]]
    back.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Success. Updated the file."})
    second = await api.responses.create(model="policy", input=back, tools=tools)
    assert second.output_text == "one" and await rig.edge.drained(session, 120)
    one, two = rig.calls(session)
    assert (one.reply, two.reply) == ("tool_calls", "answer") and one.trainable and two.trainable
    prompt = rig.prompt(two)
    assert "Success. Updated the file." in prompt and prompt.count("apply_patch") > rig.prompt(one).count("apply_patch")
    assert two.parent == one.id and two.splice in ("exact", "spliced") and two.conversation == one.conversation


@pytest.mark.parametrize("stream", [False, True])
async def test_every_kind_of_tool_of_codex(rig: EdgeRig, stream: bool) -> None:
    """A request with each kind that was captured from the program; the call of a namespace comes back under both of its names."""
    session = f"codex-kinds-{stream}"
    late = {"type": "function", "name": "late_tool", "description": "d", "parameters": {"type": "object", "properties": {}}}
    extra = [
        {"type": "additional_tools", "role": "developer", "tools": [late]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "spawn one"}]},
    ]
    body: Json = {**codex(*extra, model="gpt-5.5-codex"), "stream": stream}
    body["tools"] += [{"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}}]
    answer = await rig.post(session, PATHS["responses"], body, CODEX_HEADERS)
    assert answer.status_code == 200, answer.text
    done = stream_checks.responses(answer.text) if stream else answer.json()
    (item,) = [item for item in done["output"] if item["type"] == "function_call"]
    assert (item["namespace"], item["name"], json.loads(item["arguments"])) == (
        "multi_agent_v1",
        "spawn_agent",
        {"message": "write out.txt"},
    )
    (one,) = rig.calls(session)
    prompt = rig.prompt(one)
    for word in ("exec_command", "multi_agent_v1__spawn_agent", "apply_patch", "late_tool"):
        assert word in prompt, word
    assert {"tools: web_search", "tools: tool_search"} <= set(one.ignored) and one.model == "gpt-5.5-codex"
    back = [
        *extra,
        *done["output"],
        {"type": "function_call_output", "call_id": item["call_id"], "output": [{"type": "input_text", "text": "no agents left"}]},
    ]
    again = await rig.post(
        session, PATHS["responses"], codex(*back, model="gpt-5.5-codex") | {"tools": body["tools"], "stream": stream}, CODEX_HEADERS
    )
    assert again.status_code == 200, again.text
    two = rig.calls(session)[1]
    assert "no agents left" in rig.prompt(two) and two.parent == one.id and two.splice in ("exact", "spliced")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THREE)
async def test_a_call_that_cannot_be_parsed(rig: EdgeRig, name: str, stream: bool) -> None:
    """It stays text. Streamed, the name and the broken arguments may be out before the break is seen: the client has what was said."""
    answer = await rig.post(f"broken-{name}-{stream}", PATHS[name], request(name, "broken call", stream=stream))
    assert answer.status_code == 200 and (stream or "Here:" in answer.text)
    assert stream or not _calls(answer.json())
    if stream:
        assert "ls" in answer.text and answer.text.rstrip().endswith(
            {"chat": "[DONE]", "messages": '"type":"message_stop"}'}.get(name, "}")
        )
    (one,) = rig.calls(f"broken-{name}-{stream}")
    assert one.trainable and one.delivered and '"command": "ls"' in rig.tokenizer.decode(one.ids)


def _calls(body: Json) -> list[Any]:
    if "choices" in body:
        return body["choices"][0]["message"].get("tool_calls") or []
    return [part for part in body.get("output") or body["content"] if part["type"] in ("function_call", "tool_use")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THREE)
async def test_arguments_that_are_no_object(rig: EdgeRig, name: str, stream: bool) -> None:
    reply = await say(rig, f"text-{name}-{stream}", name, "text as arguments", stream=stream)
    ((number, called, arguments),) = reply["calls"]
    assert number and called == "bash"
    # A message can hold an object only, so unstreamed it is the one that vLLM makes of such arguments in the history.
    assert json.loads(arguments) == ({} if name == "messages" and not stream else "ls -l")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THREE)
async def test_a_tool_that_was_not_declared(rig: EdgeRig, name: str, stream: bool) -> None:
    reply = await say(rig, f"unknown-{name}-{stream}", name, "unknown tool", stream=stream)
    assert [(called, json.loads(arguments)) for _, called, arguments in reply["calls"]] == [("no_such_tool", {"a": 1})]


# --- streams


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("text", ["hi", "use the tool", "two at once", "long answer"])
async def test_a_stream_says_what_the_whole_reply_says(rig: EdgeRig, name: str, text: str) -> None:
    whole = await say(rig, f"same-{name}-{text}", name, text)
    stream = await say(rig, f"same-{name}-{text}", name, text, stream=True)
    for field in ("text", "thinking", "end"):
        assert stream[field].strip() == whole[field].strip(), field
    assert [found[1:] for found in stream["calls"]] == [(called, arguments) for _, called, arguments in whole["calls"]]
    one, two = rig.calls(f"same-{name}-{text}")
    assert one.ids == two.ids
    for reply, found in ((whole, one), (stream, two)):
        used = reply["usage"]
        inputs = used.get("prompt_tokens", used.get("input_tokens", 0)) + used.get("cache_read_input_tokens", 0)
        assert inputs == len(found.prompt_ids) and used.get("completion_tokens", used.get("output_tokens")) == len(found.ids)
    if name == "messages":
        start = stream["body"]["usage_at_start"]
        assert sum(start.get(f"{kind}input_tokens", 0) for kind in ("", "cache_read_", "cache_creation_")) == len(two.prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THREE)
async def test_thoughts_and_drafts_of_calls(thinking: EdgeRig, name: str, stream: bool) -> None:
    """A call inside the reasoning is no call; reasoning that never ends holds none."""
    rig, session = thinking, f"draft-{name}-{stream}"
    drafted = await say(rig, session, name, "draft first", stream=stream)
    assert [(called, json.loads(arguments)) for _, called, arguments in drafted["calls"]] == [("bash", {"command": "ls"})]
    assert "touch BAD" in drafted["thinking"] and "touch BAD" not in drafted["text"]
    cap = {"max_output_tokens" if name == "responses" else "max_tokens": 40}
    unclosed = await say(rig, session, name, "never closes", stream=stream, **cap)
    assert not unclosed["calls"] and unclosed["end"] in ("length", "max_tokens")
    aloud = await say(rig, session, name, "think aloud", stream=stream)
    assert (aloud["thinking"].strip(), aloud["text"].strip()) == ("let me see", "the answer")
    one, two, three = rig.calls(session)
    assert (one.reply, two.reply, three.reply) == ("tool_calls", "length", "answer") and len(two.ids) == 40
    assert "touch BAD" in rig.tokenizer.decode(one.ids) and "</think>" in rig.tokenizer.decode(three.ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THREE)
async def test_thinking_that_the_prompt_has_closed(thinking: EdgeRig, name: str, stream: bool) -> None:
    reply = await say(thinking, f"closed-{name}-{stream}", name, "hi", stream=stream, declare=False, chat_template_kwargs={"closed": True})
    assert thinking.prompt(thinking.calls(f"closed-{name}-{stream}")[0]).endswith("</think>\n\n")
    assert (reply["text"].strip(), reply["thinking"]) == ("one", "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["chat", "messages"])
async def test_a_stop_string_trims_the_text_and_keeps_the_tokens(rig: EdgeRig, name: str, stream: bool) -> None:
    session = f"stop-{name}-{stream}"
    field = {"chat": "stop", "messages": "stop_sequences"}[name]
    reply = await say(rig, session, name, "stop there", stream=stream, **{field: ["Observation:"]})
    assert reply["text"].strip() == "ls"
    if name == "messages":
        assert (reply["body"]["stop_reason"], reply["body"]["stop_sequence"]) == ("stop_sequence", "Observation:")
    else:
        assert reply["end"] == "stop"
    (one,) = rig.calls(session)
    text = rig.tokenizer.decode(one.ids)
    assert text.startswith("ls\nObservation:") and "more" not in text
    assert len(one.ids) == len(one.logprobs) == len(one.versions()) and one.trainable and one.stop_reason == "Observation:"


# --- odd requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THREE)
async def test_no_tools_is_an_empty_list_of_tools(rig: EdgeRig, name: str, stream: bool) -> None:
    choice: Any = {"type": "auto"} if name == "messages" else "auto"
    for fields in ({"tools": []}, {"tools": [], "tool_choice": choice}, {"tool_choice": choice}):
        reply = await say(rig, f"empty-{name}-{stream}", name, "hi", stream=stream, declare=False, **fields)
        assert reply["text"] == "one"


async def test_a_prompt_that_fills_the_window(rig: EdgeRig) -> None:
    """The cap is an upper bound; one token of room is one token; none is the dialect's overflow."""
    user = [{"role": "user", "content": ""}]

    def sized(tokens: int) -> str:
        overhead = len(rig.tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False))
        text = " import" * (tokens - overhead)
        length = len(rig.tokenizer.apply_chat_template([user[0] | {"content": text}], add_generation_prompt=True, return_dict=False))
        assert length == tokens, (length, tokens)
        return text

    for name, cap in (("chat", "max_completion_tokens"), ("responses", "max_output_tokens"), ("messages", "max_tokens")):
        for stream in (False, True):
            session = f"full-{name}-{stream}"
            reply = await say(rig, session, name, sized(WINDOW - 1), stream=stream, declare=False, **{cap: 4 * WINDOW})
            assert reply["end"] in ("length", "max_tokens")
            (one,) = rig.calls(session)
            assert (one.max_tokens, len(one.ids), one.status) == (1, 1, "length")
            over = await rig.post(session, PATHS[name], request(name, sized(WINDOW), stream=stream, declare=False, **{cap: 4 * WINDOW}))
            words = "prompt is too long" if name == "messages" else "maximum context length"
            assert over.status_code == 400 and words in over.text, over.text
            assert len(rig.calls(session)) == 1 and rig.reader().state(session).overflow


async def test_counting_tokens_takes_what_a_call_takes(rig: EdgeRig) -> None:
    body = request("messages", "hi") | {"thinking": {"type": "enabled", "budget_tokens": 31999}}
    body["tools"] = [*TOOLS["messages"], {"type": "web_search_20250305", "name": "web_search"}]
    counted = await rig.post(
        "count", "/v1/messages/count_tokens", {name: body[name] for name in ("model", "messages", "tools", "thinking")}
    )
    assert counted.status_code == 200, counted.text
    assert (await rig.post("count", PATHS["messages"], body)).status_code == 200
    (one,) = rig.calls("count")
    assert counted.json()["input_tokens"] == len(one.prompt_ids)


# --- waiting and failing


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THREE)
async def test_errors_have_a_status_also_in_streams(tight: EdgeRig, name: str, stream: bool) -> None:
    """vLLM has sent its headers when the engine is asked; the client sees none of that before the first token."""
    rig, session = tight, f"errors-{name}-{stream}"
    failed = await rig.post(session, PATHS[name], request(name, "engine fails", stream=stream))
    assert failed.status_code == 500 and "req_" in failed.text and "script" not in failed.text
    (call,) = rig.calls(session)
    assert (call.status, call.delivered) == ("failed", False)
    over = await rig.post(session, PATHS[name], request(name, "word " * 300, stream=stream))
    words = "prompt is too long" if name == "messages" else "maximum context length"
    assert over.status_code == 400 and words in over.text
    assert rig.reader().state(session).limit == "context" and len(rig.calls(session)) == 1


@pytest.mark.parametrize("name", THREE)
async def test_a_stream_waits_for_an_update_and_is_kept_alive(tight: EdgeRig, name: str) -> None:
    rig, session = tight, f"update-{name}"
    assert rig.recorder.admission is not None
    with rig.recorder.admission.paused():
        asking = asyncio.create_task(rig.post(session, PATHS[name], request(name, "hi", stream=True)))
        while not rig.recorder.admission.waiting:
            await asyncio.sleep(0.01)
        busy = await rig.post("another", PATHS[name], request(name, "hi", stream=True))
        assert busy.status_code == 429 and f"retry-after: {busy.headers['retry-after']}" in busy.text
        await asyncio.sleep(1)
        assert not rig.calls(session)
    answer = await asking
    mark = "event: ping" if name == "messages" else ": keep-alive"
    first = "event: response.created" if name == "responses" else mark
    assert answer.status_code == 200 and answer.text.startswith(first) and answer.text.count(mark) > 2
    {"chat": stream_checks.chat, "responses": stream_checks.responses, "messages": stream_checks.messages}[name](answer.text)
    (call,) = rig.calls(session)
    assert call.trainable and call.reply == "answer"
