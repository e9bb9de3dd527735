"""Splice through vLLM's real app, template and parsers: what harnesses make of a reply, in three dialects, streamed and not."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from forge_ray.trajectories.call import Call
from tests.built import chains
from tests.integration.edge_rig import STRICT, EdgeRig, edge_rig
from tests.integration.talk import Said, Talk
from tests.tiny_model import TEMPLATE, tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
DIALECTS = pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])


def tool_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "edit", "arguments": {arguments}}}\n</tool_call>'


EDIT = {"old": "a", "path": "p", "lines": [1, 5000.0]}
SAID = "I edit it.\n" + tool_call('{"old": "a", "path": "p", "lines": [1, 5000.0]}')
COMPACT = tool_call('{"path":"p\\u00e9\\/","old":"a","lines":[1e1]}')


def letters(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text sampled letter by letter."""
    return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]


def rules() -> list[dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    end = [tokenizer.eos_token_id]
    colon = next(id for piece, id in sorted(tokenizer.get_vocab().items()) if piece.startswith(":") and len(piece) > 1)
    return [
        {"if": "compact", "turn": 0, "say": COMPACT},
        {"if": "edit it", "turn": 0, "say": SAID},
        {"if": "letters", "turn": 0, "ids": letters(tokenizer, "hello there") + end},
        {"if": "spaces", "turn": 0, "say": "  some text \n\n"},
        {"if": "a line end", "turn": 0, "ids": letters(tokenizer, "\n    return") + end},
        {"if": "two calls", "turn": 0, "say": tool_call('{"path": "p"}') + "\n" + tool_call('{"old":"q"}')},
        {"if": "react", "turn": 0, "ids": [*letters(tokenizer, "ls\nObservation"), colon, *letters(tokenizer, "x"), *end]},
        {"if": "no end: ", "ids": letters(tokenizer, "a longer answer than may be given") + end},
        {"if": "no end", "turn": 0, "ids": letters(tokenizer, "a longer answer than may be given") + end},
        {"if": "thinks", "say": "<think>\nlet me see\n</think>\n\nI know."},
        {"if": "prefix", "ids": letters(tokenizer, "ink so") + end},
        {"if": "u", "say": "hello"},
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeRig]:
    async with edge_rig(tmp_path_factory.mktemp("splice"), rules()) as rig:
        yield rig


def continues(one: Call, two: Call) -> bool:
    """`two`'s prompt is all of `one`, token for token, and more: one sample."""
    whole = one.prompt_ids + one.ids
    samples = chains([one, two])
    assert (len(samples) == 1) == (two.prompt_ids[: len(whole)] == whole)
    if len(samples) == 1:
        assert [token for token, trained in zip(samples[0].ids, samples[0].mask, strict=True) if trained] == one.ids + two.ids
    return len(samples) == 1


async def two_turns(talk: Talk, text: str, change: Callable[[Said], Said], **more: Any) -> tuple[Call, Call]:
    talk.user(text)
    said = await talk.ask(**more)
    kept = change(said)
    talk.keep(kept)
    for id, _, _ in kept.calls:
        talk.result(id, "done")
    if not kept.calls:
        talk.user("go on")
    await talk.ask(**more)
    one, two = talk.rig.calls(talk.session)
    assert one.conversation == two.conversation and one.splice == "new"
    return one, two


def arguments(given: dict[str, Any]) -> Callable[[Said], Said]:
    return lambda said: Said(said.text, said.reasoning, [(id, name, given) for id, name, _ in said.calls])


SAME: dict[str, tuple[str, Callable[[Said], Said], str]] = {
    "as it was": ("edit it", lambda said: said, "exact"),
    "keys reordered and a default added": (
        "edit it",
        arguments({"replace_all": False, "path": "p", "lines": [1, 5000], "old": "a"}),
        "spliced",
    ),
    "keys sorted": ("edit it", arguments(dict(sorted(EDIT.items()))), "spliced"),
    "compact JSON with escapes": ("compact", lambda said: said, "spliced"),
    "letters": ("letters", lambda said: said, "spliced"),
    "text trimmed": ("spaces", lambda said: Said(said.text.strip()), "spliced"),
    "generation prompt merges": ("a line end", lambda said: said, "spliced"),
    "two calls": ("two calls", lambda said: said, "spliced"),
}
OTHER: dict[str, tuple[str, Callable[[Said], Said], str]] = {
    "another default": (
        "edit it",
        arguments({**EDIT, "replace_all": True}),
        "arguments of tool call 1 (edit): `replace_all` was added",
    ),
    "a value": ("edit it", arguments({**EDIT, "path": "q"}), "arguments of tool call 1 (edit): the value of `path`"),
    "text": ("letters", lambda said: Said("hello you"), "text of the reply differs at character 6: 'there' became 'you'"),
    "call dropped": ("edit it", lambda said: Said(said.text), "1 tool calls became 0"),
}


@BOTH_WAYS
@DIALECTS
async def test_replies_that_come_back_saying_the_same(rig: EdgeRig, dialect: str, stream: bool) -> None:
    for name, (text, change, splice) in SAME.items():
        for write in (json.dumps, lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False)):
            talk = Talk(rig, f"same-{name}-{dialect}-{stream}-{write is json.dumps}".replace(" ", "-"), dialect, stream, write=write)
            one, two = await two_turns(talk, text, change)
            assert (two.splice, continues(one, two)) == (splice, True), (name, two.reason)
            assert (two.rerendered is None, two.reason is None) == (splice == "exact", splice == "exact")
            assert (two.parent, two.shared) == (one.id, len(one.prompt_ids) + len(one.ids))
            # The template's line end after the end token is nobody's sample.
            assert rig.tokenizer.decode(two.prompt_ids[two.shared :]).startswith("\n<|im_start|>user\n")
            if dialect == "messages":
                break  # arguments are objects there


@BOTH_WAYS
@DIALECTS
async def test_replies_that_come_back_saying_something_else(rig: EdgeRig, dialect: str, stream: bool) -> None:
    for name, (text, change, reason) in OTHER.items():
        talk = Talk(rig, f"other-{name}-{dialect}-{stream}".replace(" ", "-"), dialect, stream)
        one, two = await two_turns(talk, text, change)
        assert (two.splice, two.reason, continues(one, two)) == ("fork", reason, False), name
        assert (two.parent, two.shared >= len(one.prompt_ids)) == (one.id, True)


@DIALECTS
async def test_a_last_message_that_vanishes(rig: EdgeRig, dialect: str) -> None:
    talk = Talk(rig, f"transient-{dialect}", dialect, False)
    talk.user("letters")
    talk.user("<internal context>")
    said = await talk.ask()
    talk.items.pop()
    talk.keep(said)
    talk.user("go on")
    talk.user("<internal context>")
    await talk.ask()
    one, two = rig.calls(talk.session)
    assert (one.conversation, two.splice, continues(one, two)) == (two.conversation, "fork", False)
    assert two.reason is not None and "was transient: it is gone (token " in two.reason


@BOTH_WAYS
@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_a_stop_string_that_trims_the_text(rig: EdgeRig, dialect: str, stream: bool) -> None:
    """m7: every sampled id is kept up to the token that completed the stop; the harness's text ends before it: spliced."""
    talk = Talk(rig, f"stop-{dialect}-{stream}", dialect, stream, tools=False)
    stop = {"stop": ["Observation:"]} if dialect == "chat" else {"stop_sequences": ["Observation:"]}
    got: list[Said] = []
    one, two = await two_turns(talk, "react", lambda said: got.append(said) or said, **stop)
    assert got[0].text == "ls\n" and got[0].stop == (("stop", "Observation:") if dialect == "chat" else ("stop_sequence", "Observation:"))
    text = rig.tokenizer.decode(one.ids)
    assert text.startswith("ls\nObservation:") and len(text) > len("ls\nObservation:") and one.stop_reason == "Observation:"
    assert one.spans is not None and len(one.ids) == len(one.logprobs) == one.spans[0][2]
    assert (two.splice, continues(one, two)) == ("spliced", True)
    assert rig.tokenizer.decode(two.prompt_ids[two.shared :]).startswith("<|im_end|>\n<|im_start|>user\n")


@BOTH_WAYS
async def test_a_reply_ended_by_the_second_of_two_end_tokens(tmp_path: Path, stream: bool) -> None:
    """m7: a model's generation_config names two; the one that was sampled stays, in ids and log-probabilities, and the turn goes on."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    tokenizer, config = AutoTokenizer.from_pretrained(model), json.loads((model / "generation_config.json").read_text())
    second = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    (model / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [tokenizer.eos_token_id, second]}))
    sampled, got = [*letters(tokenizer, "hello there"), second], list[Said]()
    rule = {"if": "other end", "turn": 0, "ids": [*sampled, *letters(tokenizer, "never")]}
    async with edge_rig(tmp_path, [rule], model=model) as rig:
        for dialect in ("chat", "responses", "messages"):
            one, two = await two_turns(Talk(rig, dialect, dialect, stream, tools=False), "other end", lambda said: got.append(said) or said)
            assert got[-1].text == "hello there" and (one.status, one.ids) == ("finished", sampled)
            assert len(one.ids) == len(one.logprobs) == len(one.versions()) and one.trainable
            assert (two.splice, continues(one, two)) == ("spliced", True)


@DIALECTS
async def test_a_reply_cut_by_its_length(rig: EdgeRig, dialect: str) -> None:
    talk = Talk(rig, f"length-{dialect}", dialect, False, tools=False)
    cap = {"responses": "max_output_tokens"}.get(dialect, "max_tokens")
    one, two = await two_turns(talk, "no end", lambda said: said, **{cap: 20})
    assert (one.status, len(one.ids), two.splice, continues(one, two)) == ("length", 20, "spliced", True)
    assert rig.tokenizer.decode(two.prompt_ids[two.shared :]).startswith("<|im_end|>\n<|im_start|>user\n")


async def test_a_prefilled_beginning_is_nobodys_sample(rig: EdgeRig) -> None:
    talk = Talk(rig, "prefix", "chat", False, tools=False)
    talk.user("prefix")
    talk.items.append({"role": "assistant", "content": "I th"})
    said = await talk.ask(continue_final_message=True, add_generation_prompt=False)
    talk.items[-1] = {"role": "assistant", "content": "I th" + said.text}
    talk.user("go on")
    await talk.ask()
    one, two = rig.calls("prefix")
    assert rig.prompt(one).endswith("assistant\nI th") and said.text == "ink so"
    assert (two.splice, continues(one, two)) == ("spliced", True) and rig.prompt(two).count("I think so<|im_end|>") == 1


async def test_a_plain_prompt_that_goes_on(rig: EdgeRig) -> None:
    body = {"model": "policy", "max_tokens": 20}
    first = await rig.post("plain", "/v1/completions", {**body, "prompt": "no end: "})
    text = first.json()["choices"][0]["text"]
    await rig.post("plain", "/v1/completions", {**body, "prompt": f"no end: {text}\nand u"})
    one, two = rig.calls("plain")
    assert (one.status, two.splice, continues(one, two), two.conversation) == ("length", "spliced", True, one.conversation)
    assert rig.prompt(two) == f"no end: {text}\nand u"


async def test_usage_tells_of_the_prompt_that_was_used(rig: EdgeRig) -> None:
    talk = Talk(rig, "usage", "chat", False)
    talk.user("letters")
    talk.keep(await talk.ask())
    talk.user("go on")
    answer = await rig.post("usage", "/v1/chat/completions", talk.body())
    two = rig.calls("usage")[1]
    assert two.splice == "spliced" and answer.json()["usage"]["prompt_tokens"] == len(two.prompt_ids)


@BOTH_WAYS
@DIALECTS
async def test_issued_ids_are_recorded_and_tell_retries_apart(rig: EdgeRig, dialect: str, stream: bool) -> None:
    talk = Talk(rig, f"ids-{dialect}-{stream}", dialect, stream)
    talk.user("edit it")
    first, second = await talk.ask(), await talk.ask()
    for said in (first, second):
        assert said.calls[0][0] in next(call for call in rig.calls(talk.session) if said.calls[0][0] in call.issued).issued
    stripped = first.calls[0][0].replace("_", "").replace("-", "")
    talk.keep(Said(first.text, "", [(stripped, "edit", dict(sorted(EDIT.items())))]))
    talk.result(stripped, "done")
    await talk.ask()
    one, other, two = rig.calls(talk.session)
    assert first.calls[0][0] in one.issued and (other.splice, two.splice, two.parent) == ("new", "spliced", one.id)


@pytest.mark.parametrize("template", [None, STRICT], ids=["anywhere", "first only"])
async def test_system_messages_inside_a_conversation(rig: EdgeRig, tmp_path: Path, template: str | None) -> None:
    """m1: they stand where the harness put them; where the template forbids that, the fork's reason names it."""

    async def talk_in(rig: EdgeRig) -> tuple[Call, Call]:
        talk = Talk(rig, "m1", "messages", False, system="S", tools=False)
        talk.user("u1")
        talk.items.append({"role": "system", "content": "agents: a"})
        talk.keep(await talk.ask())
        talk.user("u2")
        talk.items.append({"role": "system", "content": "reminder 2"})
        await talk.ask()
        one, two = rig.calls("m1")
        assert one.conversation == two.conversation
        return one, two

    if template is None:
        one, two = await talk_in(rig)
        assert (two.splice, continues(one, two)) == ("exact", True)
        return
    async with edge_rig(tmp_path, rules(), template=template) as strict:
        one, two = await talk_in(strict)
        assert two.splice == "fork" and two.reason is not None
        assert two.reason.startswith("a system message inside the conversation moved to the front: the chat template takes one only there")


async def test_parallel_requests_of_one_session(rig: EdgeRig) -> None:
    """Conversations side by side with one system prompt: each goes on in its own, whatever the order."""
    talks = [Talk(rig, "parallel", ("chat", "responses", "messages")[n % 3], n % 2 == 0) for n in range(9)]
    for n, talk in enumerate(talks):
        talk.user(f"letters, number {n}")
    for _ in range(3):
        for talk, said in zip(talks, await asyncio.gather(*(talk.ask() for talk in talks)), strict=True):
            talk.keep(said)
            talk.user("go on")
    by_conversation: dict[str, list[Call]] = defaultdict(list)
    for call in rig.calls("parallel"):
        by_conversation[call.conversation].append(call)
    assert len(by_conversation) == 9 and all(call.kind == "agent" for call in rig.calls("parallel"))
    for calls in by_conversation.values():
        assert [call.splice for call in calls] == ["new", "spliced", "exact"] and len(chains(calls)) == 1
        assert len({re.findall(r"number (\d)", rig.prompt(call))[0] for call in calls}) == 1


@pytest.mark.parametrize("place", ["block", "string", "chat", "another program"])
async def test_a_nonce_in_the_system_prompt(rig: EdgeRig, place: str) -> None:
    """m8: Claude Code's billing line changes nothing, wherever it stands; any other is a fork that shows the first differing token."""
    dialect, session = "chat" if place in ("chat", "another program") else "messages", f"nonce-{place}".replace(" ", "-")
    talk = Talk(rig, session, dialect, False, tools=False)

    async def ask(nonce: str) -> Said:
        line = f"x-anthropic-billing-header: cc_version=2.1.1; cch={nonce};"
        if place == "another program":
            line = f"request-id: {nonce}"
        talk.system = f"{line}\nYou change files."
        blocks = [{"type": "text", "text": line}, {"type": "text", "text": "You change files."}]
        return await talk.ask(**({"system": blocks} if place == "block" else {}))

    talk.user("letters")
    talk.keep(await ask("36ee5"))
    talk.user("go on")
    await ask("0aaa9")
    one, two = rig.calls(session)
    assert one.conversation == two.conversation
    if place != "another program":
        assert (two.splice, continues(one, two)) == ("spliced", True) and "billing" not in rig.prompt(two)
        return
    assert two.splice == "fork" and two.reason is not None
    assert two.reason.startswith("the system message changed (token ") and "36ee5" in two.reason and "0aaa9" in two.reason


THINKING = TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{% set thought = message.reasoning_content or message.reasoning %}"
    "{% if thought and 'STRIP' not in opening %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ message.content or '' }}",
)


async def test_thinking_in_three_dialects(tmp_path: Path) -> None:
    """Kept or trimmed: one sample; dropped by the harness or by the template: a fork that says who, and two samples."""
    cases: list[tuple[str, str, Callable[[Said], Said], str, str | None]] = [
        ("kept", "S", lambda said: said, "spliced", None),  # the template writes line ends of its own around what it is given
        ("trimmed", "S", lambda said: Said(said.text.strip(), said.reasoning.strip()), "exact", None),
        ("dropped", "S", lambda said: Said(said.text), "fork", "thinking of the reply dropped by the harness"),
        ("stripped", "STRIP", lambda said: said, "fork", "thinking of the reply dropped by the chat template"),
    ]
    async with edge_rig(tmp_path, rules(), template=THINKING, server={"reasoning_parser": "deepseek_r1"}) as rig:
        for name, system, change, splice, reason in cases:
            for dialect in ("chat", "responses", "messages"):
                for stream in (False, True):
                    talk = Talk(rig, f"{name}-{dialect}-{stream}", dialect, stream, system=system)
                    one, two = await two_turns(talk, "thinks", change)
                    assert two.splice == splice or (splice == "exact" and two.splice == "spliced"), (talk.session, two.reason)
                    assert continues(one, two) == (splice != "fork") and (reason is None or two.reason == reason), (
                        talk.session,
                        two.reason,
                    )
