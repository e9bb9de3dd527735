"""Splice over a toy tokenizer and template: which replies are put back as they were sampled, and why others are not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from forge_ray.config import Limits
from forge_ray.serve_proxy import history
from forge_ray.serve_proxy.placing import Asked, Placement
from forge_ray.serve_proxy.session_index import SessionIndex
from tests.unit.toy_chat import END, IDS, OTHER_END, ToyReader, encode, pieces, render, say, spelled

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "old": {"type": "string"}, "replace_all": {"type": "boolean", "default": False}},
            },
        },
    }
]


class Session:
    """One session of an index with the toy reader."""

    def __init__(self, reader: ToyReader | None = None) -> None:
        self.reader = reader or ToyReader()
        self.index = SessionIndex("r", Limits())
        self.index.reader = self.reader
        self.count = 0

    def ask(
        self, prompt: list[int], *, body: dict[str, Any] | None = None, media: tuple[str, ...] = (), issued: list[str] | None = None
    ) -> Placement:
        asked = Asked(history.read("chat", body) if body else None, media=media, issued=[] if issued is None else issued)
        placed = self.index.find("s", prompt, asked)
        self.count += 1
        self.index.enter("s", f"c{self.count}", placed)
        return placed

    def answer(self, ids: list[int], status: str = "finished", stop: Any = None, delivered: bool | None = True) -> list[int]:
        call = f"c{self.count}"
        self.index.sampled("s", len(ids))
        self.index.end("s", call, ids, status, "agent", float(self.count), stop)
        if delivered is not None:
            (self.index.delivered("s", call, "answer") if delivered else self.index.undelivered("s", [call]))
        return ids


USER = {"role": "user", "content": "go"}
MORE = {"role": "user", "content": "more"}


def reply(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def turn(session: Session, sampled: list[int], kept: str, *, template: dict[str, Any] | None = None, **answer: Any) -> Placement:
    """One reply, and the next request of a harness that kept `kept` of it."""
    options = template or {}
    session.ask(render([USER], **options))
    session.answer(sampled, **answer)
    return session.ask(render([USER, reply(kept), MORE], **options))


def expect_spliced(placed: Placement, sampled: list[int], tail: list[int]) -> None:
    assert placed.splice == "spliced", placed.reason
    assert list(placed.prompt) == render([USER]) + sampled + tail
    assert (placed.parent, placed.shared) == ("c1", len(render([USER])) + len(sampled))


TAIL = render([USER, reply(""), MORE])[len(render([USER])) + 1 :]
"""What follows the end token of the reply."""


def test_the_reply_as_it_was_sampled_is_exact() -> None:
    session = Session()
    sampled = encode("hello") + pieces(END)
    placed = turn(session, sampled, "hello")
    assert (placed.splice, placed.reason, placed.parent) == ("exact", None, "c1")
    assert list(placed.prompt) == render([USER, reply("hello"), MORE])
    assert session.reader.decoded == session.reader.parsed == 0  # nothing but token ids is looked at


def test_pieces_that_the_tokenizer_merges() -> None:
    sampled = pieces("he", "llo", END)
    placed = turn(Session(), sampled, "hello")
    expect_spliced(placed, sampled, TAIL)
    assert placed.found.rerendered == pieces("hello", END)
    assert placed.reason == "the reply came back in other tokens (token 0: 'he' became 'hello')"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"b": 1, "a": "x"}, '{"a": "x", "b": 1}'),  # sorted
        ({"b": 1, "a": "x"}, '{"b":1,"a":"x"}'),  # compact
        ('{"b":1,"a":"x"}', '{"b": 1, "a": "x"}'),  # Python's spaces
        ('{"a":5000.0,"b":1e1}', '{"a":5000,"b":10}'),
        ('{"a":"\\u00e9\\/"}', '{"a":"\\u00e9/"}'),
        ({"a": {"y": [1, {"q": 2, "p": 3}], "x": None}}, '{"a":{"x":null,"y":[1,{"p":3,"q":2}]}}'),
        ("", "{}"),
    ],
)
def test_arguments_that_say_the_same(said: Any, kept: str) -> None:
    sampled = encode(say("I do it.", ("run", said))) + pieces(END)
    expect_spliced(turn(Session(), sampled, say("I do it.", ("run", kept))), sampled, TAIL)


@pytest.mark.parametrize(
    ("said", "kept", "reason"),
    [
        ({"a": True}, '{"a": 1}', "arguments of tool call 1 (run): the value of `a`"),
        ({"a": 1}, '{"a": "1"}', "arguments of tool call 1 (run): the value of `a`"),
        ({"a": 1, "b": 2}, '{"a": 1}', "arguments of tool call 1 (run): `b` is gone"),
        ({"a": 1}, '{"a": 1, "b": false}', "arguments of tool call 1 (run): `b` was added"),
        ({"a": [1, 2]}, '{"a": [1]}', "arguments of tool call 1 (run): the length of `a`"),
        ({"a": {"b": [1]}}, '{"a": {"b": [2]}}', "arguments of tool call 1 (run): the value of `a.b[0]`"),
        ('{"a": 1', "{}", "arguments of tool call 1 (run): they are no JSON on one side"),
    ],
)
def test_arguments_that_say_something_else(said: Any, kept: str, reason: str) -> None:
    sampled = encode(say("", ("run", said))) + pieces(END)
    placed = turn(Session(), sampled, say("", ("run", kept)))
    assert (placed.splice, placed.reason) == ("fork", reason)
    assert list(placed.prompt) == render([USER, reply(say("", ("run", kept))), MORE])


def test_a_default_that_the_schema_declares() -> None:
    sampled = encode(say("", ("edit", {"old": "a", "path": "p"}))) + pieces(END)
    for kept, splice in (
        ({"replace_all": False, "path": "p", "old": "a"}, "spliced"),
        ({"replace_all": True, "path": "p", "old": "a"}, "fork"),
    ):
        session = Session()
        session.ask(render([USER]), body={"messages": [USER], "tools": TOOLS})
        session.answer(sampled)
        messages = [USER, reply(say("", ("edit", json.dumps(kept)))), MORE]
        placed = session.ask(render(messages), body={"messages": messages, "tools": TOOLS})
        assert placed.splice == splice
        assert splice == "spliced" or placed.reason == "arguments of tool call 1 (edit): `replace_all` was added"


@pytest.mark.parametrize(("said", "kept"), [(" he llo \n", "he llo"), ("hello", "  hello\n"), ("", ""), ("a\n\nb ", "a\n\nb")])
def test_text_that_was_trimmed(said: str, kept: str) -> None:
    sampled = spelled(said)
    placed = turn(Session(), sampled, kept)
    if said == kept:
        assert placed.splice == "exact"
    else:
        expect_spliced(placed, sampled, TAIL)


def test_reasoning_that_was_trimmed() -> None:
    sampled = encode(say(" yes", thinking=" well \n")) + pieces(END)
    expect_spliced(turn(Session(), sampled, say("yes", thinking="well")), sampled, TAIL)


def test_reasoning_that_the_template_strips_is_a_fork_and_no_error() -> None:
    said = say("yes", thinking="well")
    session = Session()
    session.ask(render([USER]), body={"messages": [USER]})
    session.answer(encode(said) + pieces(END))
    messages = [USER, {"role": "assistant", "content": "yes", "reasoning_content": "well"}, MORE]
    placed = session.ask(render([USER, reply(said), MORE], strips=True), body={"messages": messages})
    assert (placed.splice, placed.reason) == ("fork", "thinking of the reply dropped by the chat template")
    assert (placed.parent, placed.shared) == ("c1", len(render([USER])))


def test_reasoning_that_the_harness_drops() -> None:
    session = Session()
    session.ask(render([USER]), body={"messages": [USER]})
    session.answer(encode(say("yes", thinking="well")) + pieces(END))
    messages = [USER, reply("yes"), MORE]
    placed = session.ask(render(messages), body={"messages": messages})
    assert (placed.splice, placed.reason) == ("fork", "thinking of the reply dropped by the harness")


def test_another_text_is_a_fork_that_names_the_place() -> None:
    placed = turn(Session(), encode("I say a") + pieces(END), "I say b")
    assert (placed.splice, placed.reason) == ("fork", "text of the reply differs at character 6: 'a' became 'b'")


def test_the_end_of_the_generation_prompt_merges_with_the_reply() -> None:
    sampled = pieces("\n", "h", "i", END)
    session = Session()
    placed = turn(session, sampled, "\nhi")
    expect_spliced(placed, sampled, TAIL)
    assert (placed.found.overlap, placed.found.rerendered) == (1, pieces("\n\n", "h", "i", END))
    session.answer(pieces("o", "k", END))
    again = session.ask(render([USER, reply("\nhi"), MORE, reply("ok"), MORE]))
    assert again.splice == "exact" and list(again.prompt)[: placed.shared] == list(placed.prompt)[: placed.shared]


def test_a_reply_cut_by_its_length_gets_the_end_that_was_rendered() -> None:
    sampled = pieces("he", "llo")
    placed = turn(Session(), sampled, "hello", status="length")
    expect_spliced(placed, sampled, pieces(END) + TAIL)
    exact = turn(Session(), encode("hello"), "hello", status="length")
    assert exact.splice == "exact" and list(exact.prompt) == render([USER, reply("hello"), MORE])


def test_a_stop_string_that_trimmed_the_text() -> None:
    """The harness's text ends before the stop string; every sampled id stays, up to the token that completed it: spliced."""
    sampled = encode("ls\nObservation: x")
    placed = turn(Session(), sampled, "ls", stop="Observation:")
    expect_spliced(placed, sampled, pieces(END) + TAIL)
    other = turn(Session(), sampled, "ls\nObservation: x", stop="Observation:")
    assert other.splice == "exact"  # a harness that writes it in again gets what was sampled


def test_a_reply_ended_by_a_second_end_token() -> None:
    sampled = encode("hello") + pieces(OTHER_END)
    placed = turn(Session(), sampled, "hello", stop=IDS[OTHER_END])
    expect_spliced(placed, sampled, TAIL)


def test_a_reply_rendered_as_several_messages() -> None:
    sampled = encode(say("first", ("run", {"b": 1, "a": 2}))) + pieces(END)
    session = Session()
    session.ask(render([USER]))
    session.answer(sampled)
    placed = session.ask(render([USER, reply("first"), reply(say("", ("run", {"a": 2, "b": 1}))), MORE]))
    expect_spliced(placed, sampled, TAIL)


def test_a_parser_that_raises_compares_texts() -> None:
    broken = "<call>BROKEN {}</call>"
    sampled = spelled(broken)
    expect_spliced(turn(Session(), sampled, broken), sampled, TAIL)
    placed = turn(Session(), sampled, "<call>BROKEN { }</call>")
    assert placed.splice == "fork" and placed.reason is not None and placed.reason.startswith("text of the reply differs at character 14")


def test_a_plain_prompt_that_continues_the_text() -> None:
    session = Session()
    session.ask(encode("say it: "))
    session.answer(pieces("he", "llo"), status="length")
    placed = session.ask(encode("say it: hello, again"))
    assert placed.splice == "spliced"
    assert list(placed.prompt) == encode("say it: ") + pieces("he", "llo") + encode(", again")
    session.answer(pieces("h", "e"), status="length")
    merged = session.ask(encode("say it: hello, againhello"))
    assert merged.splice == "fork" and merged.reason is not None and "one token with what follows" in merged.reason


def test_of_two_replies_to_one_prompt_the_one_whose_id_comes_back() -> None:
    one, two = encode(say("", ("run", '{"a":1,"b":2}'))) + pieces(END), encode(say("", ("run", '{"b":2,"a":1}'))) + pieces(END)
    for returned, expected in (("call_1-a", ("c1", one)), ("call2a", ("c2", two)), ("", ("c2", two))):
        session = Session()
        for sampled, name in ((one, "call_1.a"), (two, "call_2.a")):
            placed = session.ask(render([USER]), body={"messages": [USER]}, issued=[name])
            assert (placed.splice, placed.found.continues) == ("new", None)  # a retry goes on from nobody
            session.answer(sampled)
        calls = [{"id": returned, "type": "function", "function": {"name": "run", "arguments": '{"a": 1, "b": 2}'}}] if returned else []
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, MORE]
        placed = session.ask(render([USER, reply(say("", ("run", '{"a": 1, "b": 2}'))), MORE]), body={"messages": messages})
        assert (placed.splice, placed.parent) == ("spliced", expected[0])
        assert list(placed.prompt) == render([USER]) + expected[1] + TAIL


def test_of_two_equal_replies_the_one_that_arrived() -> None:
    session = Session()
    for sampled, delivered in ((pieces("he", "llo", END), True), (pieces("he", "l", "lo", END), False)):
        session.ask(render([USER]))
        session.answer(sampled, delivered=delivered)
    assert session.ask(render([USER, reply("hello"), MORE])).parent == "c1"


def test_a_prompt_with_images_is_never_spliced() -> None:
    session = Session()
    session.ask(render([USER]), media=("image:1",))
    session.answer(pieces("he", "llo", END))
    assert session.ask(render([USER, reply("hello"), MORE]), media=("image:1",)).splice == "fork"
    session = Session()
    session.ask(render([USER]), media=("image:1",))
    session.answer(encode("hello") + pieces(END))
    assert session.ask(render([USER, reply("hello"), MORE]), media=("image:1", "image:2")).splice == "exact"
    assert session.ask(render([USER, reply("hello"), USER]), media=("image:3",)).splice == "fork"


def test_a_prompt_with_images_is_given_as_it_was_rendered() -> None:
    """The engine finds the images by their places in it."""
    session = Session()
    turn(session, pieces("he", "llo", END), "hello")
    session.answer(encode("hello") + pieces(END))
    for messages in ([USER, reply("hello"), MORE, reply("hello"), MORE], [USER, reply("hello"), MORE, MORE]):
        rendered = render(messages)
        seen = session.ask(rendered, media=("image:1",))
        assert list(seen.prompt) == rendered and seen.splice == "fork", seen.reason
        session.answer(encode("hello") + pieces(END))
        assert session.ask(render([*messages, reply("hello"), MORE]), media=("image:1",)).splice == "exact"
        session.answer(pieces(END), "failed")


def test_a_second_way_on_from_one_reply_is_a_fork() -> None:
    session = Session()
    turn(session, encode("hello") + pieces(END), "hello")
    session.answer(encode("hello") + pieces(END))
    other = session.ask(render([USER, reply("hello"), USER]))
    assert other.splice == "fork" and other.reason is not None and "'more" in other.reason
    assert (other.parent, other.shared) == ("c1", len(render([USER])) + 2)
    retry = session.ask(render([USER, reply("hello"), MORE]))
    assert retry.splice == "exact"


def test_a_fork_keeps_what_was_spliced_before_it() -> None:
    session = Session()
    first = pieces("he", "llo", END)
    placed = turn(session, first, "hello")
    session.answer(encode("two") + pieces(END))
    fork = session.ask(render([USER, reply("hello"), MORE, reply("three"), MORE]))
    assert fork.splice == "fork" and list(fork.prompt)[: len(placed.prompt)] == list(placed.prompt)
    assert (fork.parent, fork.shared) == ("c2", len(placed.prompt) + 1)  # `t` of `two` and `three`


def test_the_history_is_not_decoded_again_with_every_turn() -> None:
    reader = ToyReader()
    session, messages, costs = Session(reader), [USER], []
    for number in range(100):
        session.ask(render(messages))
        session.answer(pieces("he", "llo", END))
        messages = [*messages, reply("hello"), {"role": "user", "content": f"turn {number:03d}"}]
        costs.append(reader.decoded)
    steps = np.diff(costs)
    assert steps[2:].max() == steps[2:].min() and steps.max() < 60  # tokens decoded per turn
