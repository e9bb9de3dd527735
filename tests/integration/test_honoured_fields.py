"""Every field that a dialect lists as honoured acts in vLLM's app: what it asks for is seen with it and not without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from forge_ray.conformance.toy_model import SPECIAL
from forge_ray.serve_proxy.dialects import ALL
from forge_ray.trajectories.call import Call
from tests.integration.edge_rig import EdgeRig, edge_rig
from tests.integration.test_dialects_vllm import CLOSED, PATHS, TOOLS, call
from tests.tiny_model import tiny_model
from tests.unit.field_samples import BODIES, FORMAT, SCHEMA, USER, Json

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEGIN, INNER, _ = SPECIAL
ODD = [300, SPECIAL.index(INNER), 301, 2]
"""Sampled tokens with a special one in their midst."""
SALT, BRIEF = "salt", "be brief"
TEMPLATE = (
    "{%- if documents -%}<|im_start|>system\ndocuments {{ documents | tojson }}<|im_end|>\n{% endif -%}"
    "{%- if reasoning_effort -%}<|im_start|>system\neffort {{ reasoning_effort }}<|im_end|>\n{% endif -%}" + CLOSED
)
RULES: list[Json] = [
    {"if": "use the tool", "say": call("bash", {"command": "ls"})},
    {"if": "two at once", "say": call("bash", {"command": "ls"}) + "\n" + call("bash", {"command": "id"})},
    {"if": "stop there", "say": "ls\nObservation: x and more"},
    {"if": "odd tokens", "ids": ODD},
    {"if": "think aloud", "say": "<think>\nlet me see\n</think>\n\nthe answer"},
    {"if": "long answer", "say": "word " * 50},
    {"say": "one"},
]
STOP: Json = {"stop": ["Observation:"]}
LISTED: Json = {"include": ["message.output_text.logprobs"]}
PREFIX: Json = {"messages": [*USER, {"role": "assistant", "content": "on"}]}


@dataclass
class Seen:
    """What came of a request."""

    name: str
    status: int
    kind: str
    """The response's content type."""
    raw: str
    params: Any
    """The sampling parameters that the engine was given."""
    given: Any
    """The prompt that the engine was given, as vLLM makes it."""
    recorded: Call | None
    prompt: str
    body: Json = field(default_factory=dict)

    @property
    def call(self) -> Call:
        assert self.recorded is not None, self.raw
        return self.recorded

    @property
    def text(self) -> str:
        if self.name in ("chat", "completions"):
            choice = self.body["choices"][0]
            return choice["text"] if self.name == "completions" else choice["message"]["content"] or ""
        parts = self.body["content"] if self.name == "messages" else [part for item in self.parts("message") for part in item["content"]]
        return "".join(part.get("text", "") for part in parts)

    @property
    def calls(self) -> int:
        if self.name == "chat":
            return len(self.body["choices"][0]["message"].get("tool_calls") or ())
        return len(self.parts("function_call", "tool_use"))

    def parts(self, *kinds: str) -> list[Json]:
        """Output items or content blocks."""
        return [part for part in self.body.get("output", self.body.get("content", ())) if part["type"] in kinds]

    @property
    def thought(self) -> bool:
        return bool(self.body["choices"][0]["message"].get("reasoning") if self.name == "chat" else self.parts("reasoning"))


Effect = tuple[str, Json, Callable[[Seen], bool]]
"""What the user says, fields of the request, and what is seen with the field and not without it."""


def of_openai(cap: str) -> dict[str, Effect]:
    """Of chat, completions and responses; `cap`: the field that bounds the reply."""
    return {
        "stop": ("stop there", STOP, lambda seen: seen.text.strip() == "ls"),
        "stop_token_ids": ("odd tokens", {"stop_token_ids": [301]}, lambda seen: seen.call.ids == ODD[:3]),
        "include_stop_str_in_output": (
            "stop there",
            {**STOP, "include_stop_str_in_output": True},
            lambda seen: seen.text.strip() == "ls\nObservation:",
        ),
        "skip_special_tokens": ("odd tokens", {"skip_special_tokens": False}, lambda seen: INNER in seen.text),
        "stream": ("hi", {"stream": True}, lambda seen: seen.kind == "text/event-stream"),
        "structured_outputs": ("hi", {"structured_outputs": {"regex": "one"}}, lambda seen: seen.call.masked_by_grammar),
        "cache_salt": ("hi", {"cache_salt": SALT}, lambda seen: seen.given.get("cache_salt") == SALT),
        "model": ("hi", {"model": "another"}, lambda seen: (seen.call.kind, seen.call.model) == ("aux", "another")),
        cap: ("long answer", {cap: 3}, lambda seen: len(seen.call.ids) == 3),
    }


def of_chat_and_completions(bos: bool) -> dict[str, Effect]:
    """`bos`: whether tokens that the tokenizer adds have to be asked for."""
    return of_openai("max_tokens") | {
        "stream_options": ("hi", {"stream": True, "stream_options": {"include_usage": True}}, lambda seen: '"usage":{' in seen.raw),
        "response_format": ("hi", {"response_format": FORMAT}, lambda seen: seen.call.masked_by_grammar),
        "spaces_between_special_tokens": (
            "odd tokens",
            {"spaces_between_special_tokens": False},
            lambda seen: seen.params.spaces_between_special_tokens is False,
        ),
        "add_special_tokens": ("hi", {"add_special_tokens": bos}, lambda seen: seen.prompt.startswith(BEGIN) is bos),
        "logprobs": ("hi", {"logprobs": 1}, lambda seen: bool(seen.body["choices"][0]["logprobs"])),
        "return_tokens_as_token_ids": ("hi", {"logprobs": 1, "return_tokens_as_token_ids": True}, lambda seen: "token_id:" in seen.raw),
        "return_token_ids": ("hi", {"return_token_ids": True}, lambda seen: seen.body["choices"][0].get("token_ids") == seen.call.ids),
        "stream_interval": ("hi", {"stream": True, "stream_interval": 7}, lambda seen: seen.params.stream_interval == 7),
    }


def of_agents(name: str) -> dict[str, Effect]:
    """Of the dialects that have a template and tools."""
    one: Json = {"type": "auto", "disable_parallel_tool_use": True}
    tools: Json = {"tools": TOOLS[name]}
    return {
        "chat_template_kwargs": ("hi", {"chat_template_kwargs": {"closed": True}}, lambda seen: seen.prompt.endswith("</think>\n\n")),
        "tools": ("hi", tools, lambda seen: '"bash"' in seen.prompt),
        **(
            {"tool_choice": ("two at once", {**tools, "tool_choice": one}, lambda seen: seen.calls == 1)}
            if name == "messages"
            else {
                "tool_choice": ("use the tool", {**tools, "tool_choice": "none"}, lambda seen: seen.calls == 0),
                "parallel_tool_calls": ("two at once", {**tools, "parallel_tool_calls": False}, lambda seen: seen.calls == 1),
                "include_reasoning": ("think aloud", {"include_reasoning": False}, lambda seen: not seen.thought),
            }
        ),
    }


def told(name: str) -> Effect:
    """The field that holds what the model is asked."""
    return "", {name: "bananas" if name != "messages" else [{"role": "user", "content": "bananas"}]}, lambda seen: "bananas" in seen.prompt


EFFECTS: dict[str, dict[str, Effect]] = {
    "chat": of_chat_and_completions(bos=True)
    | of_agents("chat")
    | {
        "messages": told("messages"),
        "max_completion_tokens": ("long answer", {"max_completion_tokens": 3, "max_tokens": 5}, lambda seen: len(seen.call.ids) == 3),
        "logprobs": ("hi", {"logprobs": True}, lambda seen: bool(seen.body["choices"][0]["logprobs"])),
        "return_tokens_as_token_ids": ("hi", {"logprobs": True, "return_tokens_as_token_ids": True}, lambda seen: "token_id:" in seen.raw),
        "top_logprobs": ("hi", {"logprobs": True, "top_logprobs": 2}, lambda seen: seen.params.logprobs == 2),
        "reasoning_effort": ("hi", {"reasoning_effort": "low"}, lambda seen: "effort low" in seen.prompt),
        "add_generation_prompt": (
            "",
            {**PREFIX, "continue_final_message": True, "add_generation_prompt": False},
            lambda seen: seen.status == 200 and seen.prompt.endswith("assistant\non"),
        ),
        "continue_final_message": (
            "",
            {**PREFIX, "add_generation_prompt": False, "continue_final_message": True},
            lambda seen: seen.status == 200 and seen.prompt.endswith("assistant\non"),
        ),
        "documents": ("hi", {"documents": [{"title": "t", "text": "of bananas"}]}, lambda seen: "of bananas" in seen.prompt),
        "return_prompt_text": ("hi", {"return_prompt_text": True}, lambda seen: seen.body.get("prompt_text") == seen.prompt),
    },
    "completions": of_chat_and_completions(bos=False) | {"prompt": told("prompt")},
    "responses": of_openai("max_output_tokens")
    | of_agents("responses")
    | {
        "input": told("input"),
        "instructions": ("hi", {"instructions": BRIEF}, lambda seen: BRIEF in seen.prompt),
        "reasoning": ("hi", {"reasoning": {"effort": "low"}}, lambda seen: "effort low" in seen.prompt),
        "text": (
            "hi",
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
            lambda seen: seen.call.masked_by_grammar,
        ),
        "include": ("hi", LISTED, lambda seen: len(seen.parts("message")[0]["content"][0]["logprobs"] or ()) == len(seen.call.ids)),
        "top_logprobs": ("hi", {**LISTED, "top_logprobs": 2}, lambda seen: seen.params.logprobs == 2),
        "enable_response_messages": ("hi", {"enable_response_messages": True}, lambda seen: bool(seen.body.get("input_messages"))),
    },
    "messages": {
        name: effect for name, effect in of_openai("max_tokens").items() if name in ("stream", "cache_salt", "model", "max_tokens")
    }
    | of_agents("messages")
    | {
        "messages": told("messages"),
        "system": ("hi", {"system": BRIEF}, lambda seen: BRIEF in seen.prompt),
        "stop_sequences": ("stop there", {"stop_sequences": STOP["stop"]}, lambda seen: seen.text.strip() == "ls"),
        "thinking": ("hi", {"thinking": {"type": "disabled"}}, lambda seen: "effort none" in seen.prompt),
        "output_config": ("hi", {"output_config": {"effort": "low"}}, lambda seen: "effort low" in seen.prompt),
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeRig]:
    """Its tokenizer adds a token in front where it is asked to."""
    model = tmp_path_factory.mktemp("begins") / "model"
    shutil.copytree(tiny_model(), model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    first: Json = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    known = {BEGIN: {"id": BEGIN, "ids": [SPECIAL.index(BEGIN)], "tokens": [BEGIN]}}
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": [first, one], "pair": [first, one, two], "special_tokens": known}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    async with edge_rig(tmp_path_factory.mktemp("honoured"), RULES, template=TEMPLATE, model=model) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeRig]:
    async with edge_rig(tmp_path_factory.mktemp("thinking"), RULES, server={"reasoning_parser": "deepseek_r1"}) as rig:
        yield rig


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Prompts and sampling parameters as they reach the engine, from here on."""
    from forge_ray.serve_proxy.vllm_internals.scripted_client import ScriptedClient

    seen: list[tuple[Any, Any]] = []
    plain = ScriptedClient.generate

    async def generate(self: Any, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        seen.append((prompt, sampling_params))
        async with aclosing(plain(self, prompt, sampling_params, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    monkeypatch.setattr(ScriptedClient, "generate", generate)
    return seen


async def test_every_honoured_field_has_an_effect() -> None:
    for dialect in ALL:
        if dialect.name in BODIES:
            assert set(EFFECTS[dialect.name]) == set(dialect.fields.honoured), dialect.name


CASES = [pytest.param(name, entry, id=f"{name}-{entry}") for name in EFFECTS for entry in EFFECTS[name]]


@pytest.mark.parametrize(("name", "entry"), CASES)
async def test_an_honoured_field_acts(rig: EdgeRig, thinking: EdgeRig, engine: list[tuple[Any, Any]], name: str, entry: str) -> None:
    says, fields, effect = EFFECTS[name][entry]
    at = thinking if entry == "include_reasoning" else rig
    with_it = await _ask(at, engine, f"{name}-{entry}-with", name, says, fields)
    without = await _ask(at, engine, f"{name}-{entry}-without", name, says, {other: fields[other] for other in fields if other != entry})
    assert with_it.status == 200, with_it.raw
    assert effect(with_it) and not effect(without), f"{with_it.raw}\n{without.raw}"


async def _ask(rig: EdgeRig, engine: list[tuple[Any, Any]], session: str, name: str, says: str, fields: Json) -> Seen:
    place = {"chat": "messages", "completions": "prompt", "responses": "input", "messages": "messages"}[name]
    said = {place: [{"role": "user", "content": says}] if place == "messages" else says} if says else {}
    engine.clear()
    room = {"max_tokens": 64} if name == "completions" else {}
    answer = await rig.post(session, PATHS[name], BODIES[name] | room | said | fields)
    given, params = engine[0] if engine else (None, None)
    recorded = rig.calls(session)[0] if engine else None
    prompt = rig.prompt(recorded) if recorded is not None else ""
    kind = answer.headers["content-type"].partition(";")[0]
    body = answer.json() if kind == "application/json" else {}
    return Seen(name, answer.status_code, kind, answer.text, params, given, recorded, prompt, body)
