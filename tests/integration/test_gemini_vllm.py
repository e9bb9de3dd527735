"""The Gemini dialect over vLLM's real app and the scripted engine, spoken by Google's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google import genai
from google.genai import errors, types

from tests.integration.edge_rig import WINDOW, EdgeRig, edge_rig
from tests.tiny_model import TEMPLATE

pytestmark = pytest.mark.asyncio(loop_scope="module")

LS = {"type": "object", "properties": {"dir_path": {"type": "string"}}, "required": ["dir_path"]}
SHELL = types.FunctionDeclaration(
    name="shell",
    description="Run a command",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={"command": types.Schema(type=types.Type.STRING), "background": types.Schema(type=types.Type.BOOLEAN)},
        required=["command"],
    ),
)
TURNS = [
    '  I look ☕.\n<tool_call>\n{"name": "shell", "arguments": {"background": false, "command": "ls\\n"}}\n</tool_call>',
    '<tool_call>\n{"name": "shell", "arguments": {"command": "echo \\u00e9 \\"q\\" > a"}}\n</tool_call>\n'
    '<tool_call>\n{"name":"shell","arguments":{"command":"cat a"}}\n</tool_call>',
    'Once more.\n<tool_call>\n{"name": "shell", "arguments": {"command": "rm a"}}\n</tool_call>',
    "It is done.  ",
]
RULES: list[dict[str, Any]] = [
    *({"if": "four turns", "turn": turn, "say": text} for turn, text in enumerate(TURNS)),
    {
        "if": "think aloud",
        "turn": 0,
        "say": '<think>\nwhat is it\n</think>\n\nI look.\n<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>',
    },
    {"if": "rate it", "say": '{"score": 7}'},
    {"if": "engine fails", "say": "a few words of it", "fault": "fail", "after": 0},
    {"if": "fails later", "say": "a few words of it", "fault": "fail", "after": 2},
    {"if": "broken call", "say": '<tool_call>\n{"name": "shell", "arguments": [1]}\n</tool_call>'},
    {"if": "say one", "say": "one"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeRig]:
    async with edge_rig(tmp_path_factory.mktemp("gemini"), RULES) as rig:
        yield rig


def client(rig: EdgeRig, session: str) -> Any:
    """Google's client, asynchronous half."""
    options = types.HttpOptions(base_url=rig.base(session), httpx_async_client=rig.http2())
    return genai.Client(api_key="dummy", vertexai=False, http_options=options).aio


def path(method: str, query: str = "", model: str = "policy", version: str = "v1beta") -> str:
    return f"/{version}/models/{model}:{method}{query}"


def user(text: str) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": text}]}]}


@pytest.mark.parametrize("several", [False, True])
async def test_the_first_request_of_gemini_cli(rig: EdgeRig, several: bool) -> None:
    session = f"cli-{several}"
    second: list[dict[str, Any]] = [{"text": "do it"}, {"text": "now"}] if several else [{"text": "do it"}]
    body = {
        "contents": [{"role": "user", "parts": [{"text": "ctx"}]}, {"role": "user", "parts": second}],
        "systemInstruction": {"role": "user", "parts": [{"text": "sys"}]},
        "tools": [{"functionDeclarations": [{"name": "ls", "description": "d", "parametersJsonSchema": LS}]}],
        "generationConfig": {
            "temperature": 1,
            "topP": 0.95,
            "topK": 64,
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
        },
    }
    for query in ("?alt=sse", ""):
        answer = await rig.post(session, path("streamGenerateContent", query), body)
        assert answer.status_code == 200, answer.text
    answer = await rig.post(session, path("generateContent", version="v1"), body)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json; charset=UTF-8"
    prompts = {rig.prompt(call) for call in rig.calls(session)}
    (prompt,) = prompts  # streamed or not, the model saw the same
    said = ["<|im_start|>system\nsys", '"dir_path"', "<|im_start|>user\nctx<|im_end|>", "<|im_start|>user\ndo it"] + ["now"] * several
    assert [prompt.index(words) for words in said] == sorted(prompt.index(words) for words in said)
    one = rig.calls(session)[0]
    assert one.dialect == "gemini" and one.path == path("streamGenerateContent") and one.kind == "agent"
    assert {"generationConfig.topP", "generationConfig.thinkingConfig.thinkingBudget"} <= set(one.ignored)
    assert one.sampling["top_p"] == 1.0 and one.sampling["top_k"] in (-1, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_four_turns(rig: EdgeRig, stream: bool) -> None:
    session = f"loop-{stream}"
    config = types.GenerateContentConfig(
        system_instruction="sys",
        tools=[types.Tool(function_declarations=[SHELL])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    chat = client(rig, session).chats.create(model="policy", config=config)
    message: Any = "four turns"
    seen: list[Any] = []
    for turn in range(4):
        replies = [chunk async for chunk in await chat.send_message_stream(message)] if stream else [await chat.send_message(message)]
        assert await rig.edge.drained(session, 120)
        usage = replies[-1].usage_metadata
        call = rig.calls(session)[turn]
        assert (usage.prompt_token_count, usage.candidates_token_count) == (len(call.prompt_ids), len(call.ids))
        assert usage.total_token_count == len(call.prompt_ids) + len(call.ids)
        assert replies[-1].candidates[0].finish_reason == types.FinishReason.STOP and replies[-1].model_version == "policy"
        assert all(reply.usage_metadata is None for reply in replies[:-1])
        asked = [part.function_call for reply in replies for part in reply.candidates[0].content.parts if part.function_call]
        seen.append(
            ("".join(reply.text or "" for reply in replies if not reply.function_calls or reply.text), [call.args for call in asked])
        )
        message = [types.Part.from_function_response(name=call.name, response={"output": f"ran {call.args['command']}"}) for call in asked]
        for part, call in zip(message, asked, strict=True):
            part.function_response.id = call.id
    assert [args for _, args in seen] == [
        [{"background": False, "command": "ls\n"}],
        [{"command": 'echo é "q" > a'}, {"command": "cat a"}],
        [{"command": "rm a"}],
        [],
    ]
    calls = rig.calls(session)
    said = [[*rig.tokenizer.encode(text, add_special_tokens=False), rig.tokenizer.eos_token_id] for text in TURNS]
    assert [call.ids for call in calls] == said
    assert [call.reply for call in calls] == ["tool_calls", "tool_calls", "tool_calls", "answer"]
    assert all(call.trainable and call.kind == "agent" for call in calls) and len({call.conversation for call in calls}) == 1
    assert rig.prompt(calls[2]).count("<tool_response>") == 3 and "ran cat a" in rig.prompt(calls[2])
    # The history comes back as it was said, so each prompt continues the one before.
    assert [call.splice for call in calls[1:]] == [
        later if later == "exact" else "spliced" for later in (call.splice for call in calls[1:])
    ]
    for earlier, later in pairwise(calls):
        assert later.prompt_ids[: len(earlier.prompt_ids) + len(earlier.ids)] == [*earlier.prompt_ids, *earlier.ids]


async def test_streams_as_events_and_as_an_array(rig: EdgeRig) -> None:
    events = await rig.post("events", path("streamGenerateContent", "?alt=sse"), user("say one"))
    assert events.headers["content-type"].startswith("text/event-stream")
    from_events = [json.loads(line[6:]) for line in events.text.split("\n\n") if line]
    array = await rig.post("array", path("streamGenerateContent"), user("say one"))
    assert array.headers["content-type"] == "application/json; charset=UTF-8"
    for chunks in (from_events, array.json()):
        assert "".join(part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]) == "one"
        assert chunks[-1]["candidates"][0]["finishReason"] == "STOP" and chunks[-1]["usageMetadata"]["candidatesTokenCount"] >= 2
    assert [(call.reply, call.trainable, call.streamed) for call in rig.calls("events") + rig.calls("array")] == [
        ("answer", True, True)
    ] * 2


async def test_counting_samples_nothing_and_is_exact(rig: EdgeRig) -> None:
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[SHELL])])
    api = client(rig, "count")
    counted = await rig.post(
        "count",
        path("countTokens"),
        {
            "generateContentRequest": {
                **user("say one"),
                "tools": [{"functionDeclarations": [SHELL.model_dump(exclude_none=True, by_alias=True, mode="json")]}],
            }
        },
    )
    assert counted.status_code == 200, counted.text
    assert rig.calls("count") == []
    plain = await api.models.count_tokens(model="policy", contents="say one")
    await api.models.generate_content(model="policy", contents="say one", config=config)
    await api.models.generate_content(model="policy", contents="say one")
    assert await rig.edge.drained("count", 120)
    assert [counted.json()["totalTokens"], plain.total_tokens] == [len(call.prompt_ids) for call in rig.calls("count")]
    # Longer than the window: that is what a client counts for.
    assert (await api.models.count_tokens(model="policy", contents="word " * (2 * WINDOW))).total_tokens > WINDOW


async def test_an_output_cap_is_an_upper_bound_and_a_stop_string_ends_the_reply(rig: EdgeRig) -> None:
    api = client(rig, "cap")
    for cap in (65536, 1):
        reply = await api.models.generate_content(
            model="policy", contents="say one", config=types.GenerateContentConfig(max_output_tokens=cap)
        )
        assert reply.candidates[0].finish_reason == (types.FinishReason.STOP if cap > 1 else types.FinishReason.MAX_TOKENS)
    until = types.GenerateContentConfig(stop_sequences=["ne"])
    assert (await api.models.generate_content(model="policy", contents="say one", config=until)).text == "o"
    assert await rig.edge.drained("cap", 120)
    whole, cut, stopped = rig.calls("cap")
    assert (whole.max_tokens, cut.max_tokens) == (WINDOW - len(whole.prompt_ids), 1) and (whole.reply, cut.reply) == ("answer", "length")
    assert (stopped.stop_reason, stopped.reply, rig.tokenizer.decode(stopped.ids)) == ("ne", "answer", "one")


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent?alt=sse", "streamGenerateContent"])
async def test_overflow(rig: EdgeRig, method: str) -> None:
    empty = len(rig.tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False))
    word = rig.tokenizer.encode(" word", add_special_tokens=False)
    for length in (WINDOW - 1, WINDOW, 3 * WINDOW):
        count, left = divmod(length - empty, len(word))
        text = " word" * count + "!" * left
        session = f"overflow-{method.replace('?', '-').replace('=', '-')}-{length}"
        answer = await rig.post(session, path(method), user(text))
        if length < WINDOW:
            assert answer.status_code == 200, answer.text
            (call,) = rig.calls(session)
            assert len(call.prompt_ids) == length and (call.reply, len(call.ids)) == ("length", 1)
        else:
            assert answer.status_code == 400, answer.text[:500]
            error = answer.json()["error"]
            assert error["status"] == "INVALID_ARGUMENT" and "exceeds the maximum number of tokens" in error["message"]
            state = rig.reader().state(session)
            assert (state.overflow, state.calls) == (True, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_as_googles_client_sees_them(rig: EdgeRig, stream: bool) -> None:
    async def ask(api: Any, text: Any, **config: Any) -> Any:
        settings = types.GenerateContentConfig(**config)
        if not stream:
            return await api.models.generate_content(model="policy", contents=text, config=settings)
        return [chunk async for chunk in await api.models.generate_content_stream(model="policy", contents=text, config=settings)]

    session = f"errors-{stream}"
    api = client(rig, session)
    for text in ("engine fails", "fails later"):
        with pytest.raises(errors.ServerError, match="INTERNAL"):
            await ask(api, text)
    assert await rig.edge.drained(session, 120)
    assert [(call.status, call.delivered, call.trainable) for call in rig.calls(session)] == [("failed", False, False)] * 2
    image = types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png")
    for text, config in ((image, {}), ("x", {"candidate_count": 2}), ("x", {"cached_content": "cachedContents/x"})):
        with pytest.raises(errors.ClientError, match="INVALID_ARGUMENT") as refused:
            await ask(api, text, **config)
        assert refused.value.code == 400
    assert len(rig.calls(session)) == 2
    unknown = genai.Client(
        api_key="nope", vertexai=False, http_options=types.HttpOptions(base_url="http://proxy", httpx_async_client=rig.http2())
    ).aio
    with pytest.raises(errors.ClientError, match="UNAUTHENTICATED") as refused:
        await ask(unknown, "x")
    assert refused.value.code == 401


async def test_an_array_has_a_status_of_its_own_until_the_first_token(rig: EdgeRig) -> None:
    answer = await rig.post("array-fails", path("streamGenerateContent"), user("engine fails"))
    assert answer.status_code == 500 and answer.json()["error"]["status"] == "INTERNAL"
    try:
        later = await rig.post("array-fails-later", path("streamGenerateContent"), user("fails later"))
    except Exception as error:  # the connection is cut, which this transport hands on as what the app raised
        assert "script" in str(error)
    else:
        assert "finishReason" not in later.text
    assert await rig.edge.drained("array-fails-later", 120)
    assert not any(call.delivered for session in ("array-fails", "array-fails-later") for call in rig.calls(session))


async def test_the_key_may_come_in_the_query(rig: EdgeRig) -> None:
    token = rig.base("query").rpartition("/")[2]
    async with rig.http() as http:
        for headers, query in (({}, f"?key={token}"), ({"x-goog-api-key": token}, "")):
            answer = await http.post(f"http://proxy{path('generateContent', query)}", json=user("say one"), headers=headers)
            assert answer.status_code == 200, answer.text
    assert await rig.edge.drained("query", 120) and len(rig.calls("query")) == 2


async def test_a_router_call_is_a_side_call_under_a_grammar(rig: EdgeRig) -> None:
    schema = {"type": "OBJECT", "properties": {"score": {"type": "INTEGER"}}, "required": ["score"]}
    body = {**user("rate it"), "generationConfig": {"responseMimeType": "application/json", "responseSchema": schema}}
    answer = await rig.post("router", path("generateContent", model="gemini-3.5-flash-lite"), body)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["candidates"][0]["content"]["parts"][0]["text"]) == {"score": 7}
    (call,) = rig.calls("router")
    assert (call.kind, call.model, call.masked_by_grammar, call.trainable) == ("aux", "gemini-3.5-flash-lite", True, False)


async def test_a_call_that_cannot_be_said_in_this_form(rig: EdgeRig) -> None:
    body = {**user("broken call"), "tools": [{"functionDeclarations": [{"name": "shell"}]}]}
    for method in ("generateContent", "streamGenerateContent"):
        answer = await rig.post("broken", path(method), body)
        last = answer.json() if method == "generateContent" else answer.json()[-1]
        assert answer.status_code == 200 and last["candidates"][0]["finishReason"] == "MALFORMED_FUNCTION_CALL", answer.text
    assert all(call.delivered for call in rig.calls("broken"))


THINKING = TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' if message.reasoning_content else '' }}{{ message.content or '' }}",
)
"""A template that keeps the reasoning of earlier turns."""


async def test_thoughts_go_out_and_come_back_in_signatures(tmp_path: Path) -> None:
    async with edge_rig(tmp_path, RULES, template=THINKING, server={"reasoning_parser": "qwen3"}) as rig:
        ask = {**user("think aloud"), "tools": [{"functionDeclarations": [{"name": "shell"}]}]}
        for session, method in (("whole", "generateContent"), ("pieces", "streamGenerateContent")):
            for keep in ("thoughts", "signatures", "nothing"):
                name = f"{session}-{keep}"
                answer = await rig.post(name, path(method), ask)
                assert answer.status_code == 200, answer.text
                chunks = [answer.json()] if session == "whole" else answer.json()
                parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
                assert "".join(part["text"] for part in parts if part.get("thought")).strip() == "what is it"
                usage = chunks[-1]["usageMetadata"]
                (call,) = rig.calls(name)
                assert usage["thoughtsTokenCount"] + usage["candidatesTokenCount"] == len(call.ids) and usage["thoughtsTokenCount"] > 3
                assert call.issued == [part["functionCall"]["id"] for part in parts if "functionCall" in part] != []
                if keep != "thoughts":  # as Gemini CLI does
                    parts = [part for part in parts if not part.get("thought")]
                if keep != "signatures":
                    parts = [{key: value for key, value in part.items() if key != "thoughtSignature"} for part in parts]
                done = {"functionResponse": {"name": "shell", "id": call.issued[0], "response": {"output": "ok"}}}
                back = [*ask["contents"], {"role": "model", "parts": parts}, {"role": "user", "parts": [done]}]
                assert (await rig.post(name, path(method), {**ask, "contents": back})).status_code == 200
                one, two = rig.calls(name)
                goes_on = two.prompt_ids[: len(one.prompt_ids) + len(one.ids)] == [*one.prompt_ids, *one.ids]
                assert (goes_on, two.splice == "fork") == ((False, True) if keep == "nothing" else (True, False)), (name, two.reason)


async def test_probes(rig: EdgeRig) -> None:
    api = client(rig, "probes")
    card = await api.models.get(model="policy")
    assert (card.name, card.input_token_limit) == ("models/policy", WINDOW)
    assert [model.name async for model in await api.models.list()] == ["models/policy"]
    async with rig.http() as http:
        for method, route in (("GET", path("generateContent")), ("POST", "/v1beta/models/policy:embedContent"), ("POST", "/v1beta/files")):
            answer = await http.request(method, rig.base("probes") + route, json={})
            assert answer.status_code in (404, 405) and answer.json()["error"]["status"] in ("NOT_FOUND", "UNIMPLEMENTED")
    assert rig.calls("probes") == []
