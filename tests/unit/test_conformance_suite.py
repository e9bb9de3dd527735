"""The conformance suite itself: its check finds what is wrong with a recording, its upstream says the script's words, its door breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge_ray.conformance import check, dialects
from forge_ray.conformance.__main__ import main
from forge_ray.conformance.bench import Foreign, script_of
from forge_ray.conformance.cases import CASES
from forge_ray.conformance.dialects.base import TURN
from forge_ray.conformance.door import Door, Fault, FaultKind, Forward
from forge_ray.conformance.plan import Plan
from forge_ray.conformance.programs import PROGRAMS
from forge_ray.conformance.recording import RecordedCall
from forge_ray.conformance.reply import Reply, ToolCall, read
from forge_ray.conformance.spelling import Spelling, spell

VALUE = {"command": "printf '%s' \"naïve 👩‍💻\" > a/b", "timeout": 60, "nested": {"x": [1, None]}}


class Text:
    """Reader of the recordings that this test makes up."""

    turn_mark = TURN

    async def calls(self, session: str) -> list[RecordedCall]:
        raise NotImplementedError

    def sampled(self, say: str) -> str:
        return say


def plan_of(program: str, case: str) -> Plan:
    plan = CASES[case](PROGRAMS[program])
    assert plan is not None
    return plan


def recorded(plan: Plan, lines: Sequence[str]) -> list[RecordedCall]:
    """What a proxy without fault records of `plan`, whose conversations' calls are `lines` in order; Hermes text in place of tokens."""
    say = {plan.line(rule["name"]): rule["say"] for rule in plan.rules}
    expected = {call.line: call for call in plan.calls}
    first = {"main": plan.prompt}
    calls: list[RecordedCall] = []
    last: dict[str, RecordedCall] = {}
    for line in lines:
        conversation = expected[line].conversation or ""
        before = last.get(conversation)
        if before is None:
            spawner = next((c for c in calls if c.id == expected[line].spawned_by), None)
            opening = first.get(conversation) or json.loads(read(str(spawner and spawner.sampled)).calls[0].arguments)["prompt"]
            prompt = opening + TURN
        else:
            prompt = f"{before.prompt}{before.sampled}\n{TURN}"
        call = RecordedCall(
            id=line,
            prompt=prompt,
            sampled=say[line],
            prompt_text=prompt,
            counted=True,
            dialect=PROGRAMS[plan.program].dialect,
            kind=expected[line].kind,
            conversation=conversation,
            spawned_by=expected[line].spawned_by,
            continuation="new" if before is None else "exact",
            continues=before.id if before else None,
        )
        calls.append(call)
        last[conversation] = call
    return calls


def problems(plan: Plan, calls: list[RecordedCall]) -> list[str]:
    return [str(problem) for problem in check.recording(plan, calls, script_of([plan]), Text())]


WORDS = plan_of("qwen_code", "words")
SUBAGENT = plan_of("zeroclaw", "subagent")
TURNS = ["main.0", "main.1", "main.2", "main.3"]
AGENTS = ["main.0", "sub.0", "sub.1", "main.1"]


def test_a_faultless_recording() -> None:
    assert problems(WORDS, recorded(WORDS, TURNS)) == []
    assert problems(SUBAGENT, recorded(SUBAGENT, AGENTS)) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"sampled": "<think></think>something else"}, "recording: main.2 was sampled as"),
        ({"counted": False}, "recording: main.2 is missing"),
        ({"dialect": "messages"}, "recording: the dialect is messages, not chat"),
        ({"kind": "aux"}, "kind: main.2 is aux, not agent"),
        ({"conversation": "other"}, "conversation: main.2 is not in the conversation of main"),
        ({"continuation": "fork", "reason": "text differs"}, "continuation: main.2 is fork (text differs), not exact or spliced"),
        ({"continues": "gone"}, "continuation: main.2 goes on from a call that is not recorded"),
        ({"continues": "main.0"}, "continuation: main.2 does not go on from the call before it"),
        ({"continues": "main.3"}, "continuation: main.2 does not begin with the call that it goes on from"),
        ({"spawned_by": "main.0"}, "conversation: main.2 was begun by main.0, not by None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_a_call_is_found(change: dict[str, Any], found: str) -> None:
    calls = recorded(WORDS, TURNS)
    calls[2] = replace(calls[2], **change)
    assert any(problem.startswith(found) for problem in problems(WORDS, calls)), problems(WORDS, calls)


def test_a_call_too_many_too_few_or_twice() -> None:
    calls = recorded(WORDS, TURNS)
    assert "recording: main.1 is missing" in problems(WORDS, [call for call in calls if call.id != "main.1"])
    assert "duplicate: main.1 counts 2 times" in problems(WORDS, [*calls, replace(calls[1], id="again")])
    stranger = replace(calls[0], id="stranger", prompt="a title?" + TURN, prompt_text="a title?" + TURN)
    assert "recording: 1 call(s) that the script does not have (?)" in problems(WORDS, [*calls, stranger])


def test_a_subagent_that_nobody_started_or_in_the_main_conversation() -> None:
    calls = recorded(SUBAGENT, AGENTS)
    orphan = [replace(call, spawned_by=None) for call in calls]
    assert "conversation: sub.0 was begun by None, not by main.0" in problems(SUBAGENT, orphan)
    mixed = [replace(call, conversation="main") for call in calls]
    assert "conversation: sub.0 is in the conversation of main, not of sub" in problems(SUBAGENT, mixed)


def test_the_workspace_is_compared_byte_for_byte(tmp_path: Path) -> None:
    for name, text in WORDS.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert check.workspace(WORDS, tmp_path) == []
    (tmp_path / "one.txt").write_text(WORDS.files["one.txt"].rstrip("\n"))
    (tmp_path / "two.txt").unlink()
    assert [problem.text.split(",")[0].split(" holds")[0] for problem in check.workspace(WORDS, tmp_path)] == [
        "one.txt",
        "two.txt is missing",
    ]


def test_every_spelling_is_the_same_value() -> None:
    spellings: list[Spelling] = ["compact", "python", "reversed", "escaped", "spaced"]
    texts = {spelling: spell(VALUE, spelling) for spelling in spellings}
    assert all(json.loads(text) == VALUE for text in texts.values()) and len(set(texts.values())) == 5
    assert texts["escaped"].isascii() and "a\\/b" in texts["escaped"] and list(json.loads(texts["reversed"])) != list(VALUE)


REPLY = Reply(" Text,\n 漢字 ", (ToolCall("Bash", spell(VALUE, "escaped")), ToolCall("Bash", "{}")), "\n thought\n")


def test_a_reply_reads_back_as_it_was_said() -> None:
    assert read(REPLY.say()) == REPLY
    assert read(Reply("plain").say()) == Reply("plain")


ROUTES = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/policy:streamGenerateContent?alt=sse",
}


def body(dialect: str, text: str) -> dict[str, Any]:
    """A streamed request of one user message."""
    if dialect == "gemini":
        return {"contents": [{"role": "user", "parts": [{"text": text}]}]}
    message = {"role": "user", "content": text}
    return {"model": "policy", "stream": True, "input" if dialect == "responses" else "messages": [message]}


async def ask(url: str, dialect: str, text: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(url + ROUTES[dialect], json=body(dialect, text), timeout=60)


@pytest.mark.parametrize("dialect", ROUTES)
async def test_the_upstream_says_the_script_in_every_dialect(dialect: str) -> None:
    bench = await foreign(WORDS).start()
    try:
        answer = await ask(bench.door.url, dialect, WORDS.prompt)
        stranger = await ask(bench.door.url, dialect, "who are you?")
    finally:
        await bench.stop()
    assert answer.status_code == 200 and dialects.named(dialect).serves(ROUTES[dialect].partition("?")[0])
    reply = read(WORDS.rules[0]["say"])
    assert (said(answer.text, *TEXTS[dialect]), said(answer.text, *NAMES[dialect])) == (reply.text, "run_shell_command")
    assert said(stranger.text, *TEXTS[dialect]) == "done."
    assert [name for names in bench.upstream.said.values() for name in names] == ["qwen_code/words:main.0", ""]


TEXTS = {
    "chat": ("delta", "content"),
    "responses": ("response.output_text.delta", "delta"),
    "messages": ("delta", "text"),
    "gemini": ("parts", "text"),
}
"""What holds a piece of text in a stream: the key (or the event's type) above it, and its own key."""
NAMES = {
    "chat": ("function", "name"),
    "responses": ("response.output_item.done", "name"),
    "messages": ("content_block", "name"),
    "gemini": ("functionCall", "name"),
}


def said(stream: str, above: str, key: str) -> str:
    """The strings under `key` below `above`, put together."""

    def walk(value: Any, below: bool) -> str:
        if isinstance(value, list):
            return "".join(walk(part, below) for part in value)
        if not isinstance(value, dict):
            return ""
        below = below or value.get("type") == above
        own = "".join(
            part if below and name == key and isinstance(part, str) else walk(part, below or name == above) for name, part in value.items()
        )
        return own

    return walk([json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")], False)


def foreign(plan: Plan, port: int = 0) -> Foreign:
    return Foreign([plan], url=None, key="k", model="policy", port=port, reader=None, settle_s=0)


@pytest.mark.parametrize("kind", ["429", "429-retry-after", "500", "reset", "cut"])
async def test_the_door_breaks_the_one_request_it_is_told_to(kind: FaultKind) -> None:
    bench = await foreign(WORDS).start()
    door = await Door(Forward(bench.door.url), [Fault(kind, WORDS.prompt, at=1)]).start()
    try:
        outcomes = []
        for _ in range(3):
            try:
                answer = await ask(door.url, "chat", WORDS.prompt)
                outcomes.append((answer.status_code, answer.headers.get("retry-after")))
            except httpx.TransportError as error:
                outcomes.append((type(error).__name__, None))
        await asyncio.sleep(0)
    finally:
        await door.stop()
        await bench.stop()
    broken = {
        "429": (429, None),
        "429-retry-after": (429, "1"),
        "500": (500, None),
        "reset": ("ReadError", None),
        "cut": ("RemoteProtocolError", None),
    }
    assert outcomes == [(200, None), broken[kind], (200, None)]
    assert [(exchange.fault, exchange.whole) for exchange in door.completions()] == [
        (None, True),
        (kind, kind not in ("reset", "cut")),
        (None, True),
    ]


def test_names_of_rules_tell_the_plan() -> None:
    plans = [plan for program in PROGRAMS.values() for case in CASES.values() if (plan := case(program)) is not None]
    names = [rule["name"] for plan in plans for rule in plan.rules]
    assert len(set(names)) == len(names)
    for plan in plans:
        assert {call.line for call in plan.calls} <= {plan.line(rule["name"]) for rule in plan.rules}
    script_of(plans)  # every rule is one


def test_what_cannot_run_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--list"]) == 0 and "claude_code" in capsys.readouterr().out
    monkeypatch.setenv("FORGE_RAY_CACHE", str(tmp_path / "cache"))
    assert main(["--program", "codex", "--case", "words"]) == 1  # not installed
    out = capsys.readouterr().out
    assert "missing" in out and "forge_ray.harnesses.install" in out
    monkeypatch.undo()
    monkeypatch.setattr("forge_ray.conformance.suite.plans_of", lambda *_: ([WORDS], []))
    assert main(["--proxy", "none", "--reader", "json:Nobody", "--keep", str(tmp_path / "keep")]) == 2
    assert capsys.readouterr().err.strip().startswith("error: --reader: json:Nobody cannot be used")
