"""Audit of a chat template with the server's parsers, for `forge-ray check`: what will training see of a conversation?

Nothing is guessed from the template's text. The replica's inside (vLLM's app, the edge, the recording) runs here over a scripted engine
that says what the template itself writes for a reply; requests are sent as a harness sends them, replies are returned as they came, and the
recording says how each prompt continued. No weights are loaded.

    python -m forge_ray.serve_proxy.template_audit CONFIG MODEL    (a run's config.yaml; prints a JSON list of findings)
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.serve_proxy.inside import Inside, inside
from forge_ray.serve_proxy.template_writer import ANSWER, THOUGHT, TOOL, Format, Message, Writer

ONE_SAMPLE = "the calls of a rollout merge into one sample"
KEEPS = "use a template that keeps its history"
MANY_SAMPLES = "each call becomes a sample of its own: right, but more tokens to train"


@dataclass(frozen=True)
class Found:
    """One thing that was tried."""

    topic: str
    state: str
    good: bool = True
    fix: str = ""


@dataclass
class Scene:
    """Turns of one session: what the policy says, what the harness sends."""

    name: str
    says: list[str]
    tools: bool = False


class Stage:
    """A harness in front of a replica's inside."""

    def __init__(self, server: Inside, model: str) -> None:
        self._server, self._model = server, model

    async def ask(self, session: str, messages: list[Message], *, tools: bool = False) -> tuple[int, Message]:
        """Status and the reply's message (or the error)."""
        body: dict[str, Any] = {"model": self._model, "messages": messages, **({"tools": [TOOL]} if tools else {})}
        answer = await self._server.post(session, "/v1/chat/completions", body)
        content = answer.json()
        if answer.status_code != 200:
            return answer.status_code, content.get("error", content)
        kept = ("role", "content", "reasoning", "tool_calls")
        return 200, {name: value for name, value in content["choices"][0]["message"].items() if name in kept and value}

    async def remind(self, session: str, messages: list[Message]) -> tuple[int, str]:
        """A request of the messages dialect, as Claude Code sends reminders. Status and the reply's text (or the error)."""
        body = {"model": self._model, "max_tokens": 512, "system": "Be brief.", "messages": messages}
        answer = await self._server.post(session, "/v1/messages", body)
        content = answer.json()
        if answer.status_code != 200:
            return answer.status_code, str((content.get("error") or {}).get("message"))
        return 200, "".join(block.get("text", "") for block in content["content"])

    def last(self, session: str) -> tuple[str, str | None]:
        """How the session's last prompt continued, and why."""
        call = self._server.recorded(session)[-1]
        return call.splice, call.reason


def scenes(form: Format) -> Iterator[Scene]:
    """What is played. A scene's name stands in its first user message, which the script knows it by."""
    if form.answer is not None:
        yield Scene("audit-answers", [form.answer] * 3)
        yield Scene("audit-reminders", [form.answer] * 3)
    if form.call is not None:
        yield Scene("audit-tools", [form.call, form.answer or ANSWER], tools=True)
    if form.calls is not None:
        yield Scene("audit-parallel", [form.calls], tools=True)
    if form.thought is not None:
        yield Scene("audit-thoughts", [form.thought] * 2)
    if form.drafted is not None:
        yield Scene("audit-drafts", [form.drafted], tools=True)


async def play(stage: Stage, form: Format, config: Config) -> list[Found]:
    """Play every scene and say what came of it."""
    played = {scene.name: scene for scene in scenes(form)}
    server, found = config.policy.server, []
    if "audit-answers" in played:
        found.append(await _answers(stage))
        found.append(await _reminders(stage))
    else:
        found.append(Found("chat template", "it cannot write an assistant message", False, "correct policy.chat_template"))
    found.append(await _tools(stage, played, server.get("tool_call_parser")))
    found.append(await _thoughts(stage, played, form, server.get("reasoning_parser")))
    if "audit-drafts" in played:
        found.append(await _drafts(stage, server.get("reasoning_parser")))
    return found


def _continued(topic: str, what: str, splice: str, reason: str | None) -> Found:
    if splice in ("exact", "spliced"):
        how = "token for token" if splice == "exact" else "once sampled tokens take the place of re-rendered ones"
        return Found(topic, f"{what} continues the one before {how}: {ONE_SAMPLE}")
    return Found(topic, f"{what} does not continue the one before ({reason}): {MANY_SAMPLES}", False, KEEPS)


async def _answers(stage: Stage) -> Found:
    topic, session = "template: turns", "audit-answers"
    messages: list[Message] = [{"role": "user", "content": session}]
    status, first = await stage.ask(session, messages)
    if status != 200:
        return Found(topic, f"a plain request is refused ({first.get('message')})", False, "correct policy.chat_template or policy.server")
    if (first.get("content") or "").strip() != ANSWER:
        shown = first.get("content") or f"nothing, and {first.get('reasoning')!r} as reasoning"
        return Found(topic, f"an answer reaches the harness as {shown}", False, "choose the reasoning_parser that fits the template")
    status, second = await stage.ask(session, [*messages, first, {"role": "user", "content": "more"}])
    if status != 200:
        return Found(topic, f"a second turn is refused ({second.get('message')})", False, "correct policy.chat_template")
    return _continued(topic, "a second turn", *stage.last(session))


async def _reminders(stage: Stage) -> Found:
    topic, session = "template: reminders", "audit-reminders"
    messages: list[Message] = [{"role": "user", "content": session}, {"role": "system", "content": "agents: one"}]
    meaning = "system messages within the conversation (Claude Code's reminders)"
    fix = "let the template take system messages anywhere"
    status, said = await stage.remind(session, messages)
    if status != 200:
        return Found(topic, f"{meaning} are refused ({said})", False, fix)
    answer = {"role": "assistant", "content": said}
    messages = [*messages, answer, {"role": "user", "content": "more"}, {"role": "system", "content": "reminder two"}]
    status, said = await stage.remind(session, messages)
    if status != 200:
        return Found(topic, f"{meaning} are refused on the second turn ({said})", False, fix)
    splice, reason = stage.last(session)
    found = _continued(topic, f"a turn with {meaning}", splice, reason)
    return found if found.good else replace(found, fix=fix)


async def _tools(stage: Stage, played: dict[str, Scene], parser: str | None) -> Found:
    topic, session = "template: tools", "audit-tools"
    if session not in played:
        if parser is None:
            return Found(topic, "the template writes no tool calls and no parser is set: a harness's tools will not be called")
        fix = "use a template that knows tools, or leave the parser out"
        return Found(topic, f"tool_call_parser {parser} is set, but the template writes no tool calls", False, fix)
    if parser is None:
        return Found(
            topic,
            "the template writes tool calls, but policy.server.tool_call_parser is not set: harnesses get them as text",
            False,
            "set the parser of the model's family, e.g. policy.server.tool_call_parser=hermes",
        )
    messages: list[Message] = [{"role": "user", "content": session}]
    status, reply = await stage.ask(session, messages, tools=True)
    if problem := _other_calls(status, reply, ["uptime"]):
        return Found(topic, f"{parser} does not read the template's tool calls back: {problem}", False, "choose the parser that fits")
    results: list[Message] = [{"role": "tool", "tool_call_id": call["id"], "content": "a.txt"} for call in reply["tool_calls"]]
    status, second = await stage.ask(session, [*messages, reply, *results], tools=True)
    if status != 200:
        return Found(topic, f"a tool's result is refused ({second.get('message')})", False, "correct policy.chat_template")
    found = _continued(topic, "a turn after a tool call", *stage.last(session))
    if "audit-parallel" not in played:
        return replace(found, state=f"{found.state}; the template writes no two calls in one reply")
    status, reply = await stage.ask("audit-parallel", [{"role": "user", "content": "audit-parallel"}], tools=True)
    if problem := _other_calls(status, reply, ["uptime", "whoami"]):
        return Found(topic, f"{parser} does not read two calls in one reply: {problem}", False, "choose the parser that fits")
    return replace(found, state=f"{parser} reads calls back; {found.state}")


async def _thoughts(stage: Stage, played: dict[str, Scene], form: Format, parser: str | None) -> Found:
    topic, session = "template: thinking", "audit-thoughts"
    if session not in played:
        strips = " (what a model thinks is left out of its history)" if parser else ""
        state = f"the template writes no reasoning{strips}"
        if parser is None:
            return Found(topic, state)
        return Found(topic, f"{state}; thinking replies fork: {MANY_SAMPLES}", False, "use a template that keeps reasoning")
    if parser is None:
        return Found(
            topic,
            "the template writes reasoning, but policy.server.reasoning_parser is not set: harnesses get thinking as the answer",
            False,
            "set the parser of the model's family, e.g. policy.server.reasoning_parser=qwen3",
        )
    messages: list[Message] = [{"role": "user", "content": session}]
    status, reply = await stage.ask(session, messages)
    if status != 200 or (reply.get("reasoning") or "").strip() != THOUGHT or (reply.get("content") or "").strip() != ANSWER:
        problem = f"it gives reasoning {reply.get('reasoning')!r} and content {reply.get('content')!r}"
        return Found(topic, f"{parser} does not read the template's reasoning back: {problem}", False, "choose the parser that fits")
    status, second = await stage.ask(session, [*messages, reply, {"role": "user", "content": "more"}])
    if status != 200:
        return Found(topic, f"a turn after reasoning is refused ({second.get('message')})", False, "correct policy.chat_template")
    splice, reason = stage.last(session)
    if splice == "fork":
        state = f"{parser} reads reasoning back; the template strips it from earlier turns ({reason}): {MANY_SAMPLES} for each user turn"
        return Found(topic, state, False, "use a template that keeps reasoning, if the deployed model has it too")
    return _continued(topic, f"{parser} reads reasoning back; a turn after it", splice, reason)


async def _drafts(stage: Stage, parser: str | None) -> Found:
    topic, session = "template: drafts", "audit-drafts"
    status, reply = await stage.ask(session, [{"role": "user", "content": session}], tools=True)
    problem = _other_calls(status, reply, ["uptime"])
    if problem is None:
        return Found(topic, "a tool call that is only thought of is not made")
    fix = "set policy.server.reasoning_parser" if parser is None else "choose a reasoning_parser and tool_call_parser that fit"
    return Found(topic, f"a tool call that is only thought of is taken for a real one: {problem}", False, fix)


def _other_calls(status: int, reply: Message, commands: list[str]) -> str | None:
    """What a reply has in the place of the calls that were said; None if it has them."""
    if status != 200:
        return f"the request is refused ({reply.get('message')})"
    got = []
    for call in reply.get("tool_calls") or ():
        try:
            got.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
        except (KeyError, TypeError, ValueError):
            got.append(("?", call))
    if got == [("bash", {"command": command, "cwd": "/"}) for command in commands]:
        return None
    return f"the harness gets {got!r}, text {reply.get('content')!r}" if got else f"the harness gets text {reply.get('content')!r}"


async def audit(config: Config, model_dir: str, directory: Path) -> list[Found]:
    """Audit the template of `model_dir` as `config` serves it. `directory`: an empty one for the recording."""
    from forge_ray.serve_proxy.scripted_engine import Rule, Script

    template = Path(config.policy.chat_template).read_text() if config.policy.chat_template else None
    async with inside(config, model_dir, directory) as server:
        form = Writer(server.engine.tokenizer, template).format(thinks="reasoning_parser" in config.policy.server)
        rules = [{"if": scene.name, "turn": turn, "say": text} for scene in scenes(form) for turn, text in enumerate(scene.says)]
        server.engine.script = Script([Rule.model_validate(rule) for rule in rules])
        return await play(Stage(server, config.policy.served_name), form, config)


def main() -> None:
    config, model_dir = load(sys.argv[1]), sys.argv[2]
    try:
        with tempfile.TemporaryDirectory(prefix="forge-ray-audit-") as directory:
            found = asyncio.run(audit(config, model_dir, Path(directory)))
    except UserError as error:
        print(json.dumps({"where": error.where, "problem": error.problem, "fix": error.fix}))
        sys.exit(2)
    print(json.dumps([asdict(entry) for entry in found]))


if __name__ == "__main__":
    main()
