"""Every field that a dialect lists, and some that none lists: honoured, ignored and named in the record, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_ray.serve_proxy.dialects import ALL
from tests.unit.edge_app import Rig
from tests.unit.field_samples import BODIES, HONOURED, IGNORED, REFUSED, REFUSED_PARTS, Json
from tests.unit.test_edge import client

DIALECTS = {dialect.name: dialect for dialect in ALL if dialect.name in BODIES}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, max_body_bytes=1 << 20)
    yield rig
    rig.log.close()


async def post(rig: Rig, name: str, fields: Json, purpose: Any = "train") -> Any:
    async with client(rig) as http:
        path = f"/s/{rig.token('s', purpose)}{DIALECTS[name].path}"
        answer = await http.post(path, json=BODIES[name] | {"ids": [1]} | fields)
    assert await rig.edge.drained("s", 60)
    return answer


def pairs(samples: dict[str, Json]) -> list[Any]:
    return [pytest.param(name, field, value, id=f"{name}-{field}") for name in samples for field, value in samples[name].items()]


@pytest.mark.parametrize("name", list(DIALECTS))
def test_no_entry_is_without_a_sample(name: str) -> None:
    fields = DIALECTS[name].fields
    assert set(fields.honoured) == set(HONOURED[name]) and set(fields.refused) == set(REFUSED[name])
    listed = {entry.rstrip("…") for entry in [*fields.ignored, *fields.sampling]}
    assert all(any(sample.startswith(entry) for sample in IGNORED[name]) for entry in listed)
    twice = [*fields.honoured, *fields.ignored, *fields.sampling, *fields.refused]
    assert len(twice) == len(set(twice)), "a field is in two lists"
    assert fields.removed <= {*fields.ignored, *fields.refused}


@pytest.mark.parametrize(("name", "field", "value"), pairs(IGNORED))
async def test_ignored_fields_are_named_in_the_record(rig: Rig, name: str, field: str, value: Json) -> None:
    answer = await post(rig, name, value)
    assert answer.status_code == 200, answer.text
    (call,) = rig.read().session("s")
    assert field in call.ignored and call.model == "policy"
    if field in DIALECTS[name].fields.removed:
        assert field not in rig.seen[0]


@pytest.mark.parametrize(("name", "field", "value"), pairs(HONOURED))
async def test_honoured_fields_are_not(rig: Rig, name: str, field: str, value: Json) -> None:
    answer = await post(rig, name, value)
    assert answer.status_code == 200, answer.text
    (call,) = rig.read().session("s")
    assert not set(call.ignored) & (set(value) | {field}) and set(call.ignored) <= {"ids"}
    assert call.model == value.get("model", "policy")


@pytest.mark.parametrize(("name", "field", "value"), pairs(REFUSED))
async def test_refused_fields_are_named_in_the_error(rig: Rig, name: str, field: str, value: Any) -> None:
    answer = await post(rig, name, {field: value})
    _is_named(rig, answer, name, field)


@pytest.mark.parametrize(("name", "where", "fields"), REFUSED_PARTS)
async def test_refused_parts_are_named_by_their_place(rig: Rig, name: str, where: str, fields: Json) -> None:
    _is_named(rig, await post(rig, name, fields), name, where)


def _is_named(rig: Rig, answer: Any, name: str, where: str) -> None:
    error = answer.json()["error"]
    assert answer.status_code == 400 and where in error["message"] and error["type"] == "invalid_request_error"
    assert name == "messages" or error["param"] == where
    assert rig.seen == [] and [event["reason"] for event in rig.events()] == ["field"]


@pytest.mark.parametrize("name", list(DIALECTS))
async def test_an_evaluation_that_obeys_the_harness_ignores_no_temperature(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path, obeyed=frozenset({"eval"}))
    await post(rig, name, {"temperature": 0.2, "top_p": 0.5, "unknown": 1}, "eval")
    await post(rig, name, {"temperature": 0.2, "top_p": 0.5}, "train")
    first, second = [set(call.ignored) for call in rig.read().session("s")]
    assert first == {"ids", "unknown"} and second == {"ids", "temperature", "top_p"}
    rig.log.close()


async def test_requests_of_the_real_programs_name_what_they_send_in_vain(rig: Rig) -> None:
    from tests.integration.requests_of_harnesses import claude_code, codex

    await post(rig, "responses", codex() | {"stream": False})
    await post(rig, "messages", claude_code(stream=False))
    one, two = [set(call.ignored) - {"ids"} for call in rig.read().session("s")]
    assert one == {
        "store",
        "prompt_cache_key",
        "client_metadata",
        "reasoning.summary",
        "include: reasoning.encrypted_content",
        "tools: web_search",
    }
    assert two == {"metadata", "context_management"}
    kinds = [tool["type"] for tool in rig.seen[0]["tools"]]
    assert kinds == ["function", "function", "namespace", "custom"] and rig.seen[0]["tools"][3]["format"] == {"type": "text"}


async def test_tools_that_come_in_the_input_are_declared(rig: Rig) -> None:
    late = {"type": "function", "name": "late", "parameters": {"type": "object", "properties": {}}}
    search = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "agents"}}
    agents = {"type": "namespace", "name": "agents", "description": "d", "tools": [late]}
    items = [
        {"role": "user", "content": "hi"},
        {"type": "additional_tools", "role": "developer", "tools": [late, {"type": "web_search"}]},
        search,
        {"type": "tool_search_output", "call_id": "c1", "execution": "client", "status": "completed", "tools": [agents, late]},
    ]
    assert (await post(rig, "responses", {"input": items, "tools": [late | {"name": "early"}]})).status_code == 200
    seen = rig.seen[0]
    assert [tool["name"] for tool in seen["tools"]] == ["early", "late", "agents"]
    assert [item.get("type") for item in seen["input"]] == [None, "function_call", "function_call_output"]
    assert seen["input"][1] == {"type": "function_call", "call_id": "c1", "name": "tool_search", "arguments": '{"query": "agents"}'}
    assert "agents" in seen["input"][2]["output"]
    assert "tools: web_search" in rig.read().session("s")[0].ignored
