"""The engine tap with splice: what the engine is given, what stands in the log, and that the log is enough to go on after a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_ray.config import Limits, Proxy
from forge_ray.serve_proxy import history
from forge_ray.serve_proxy.identity import CallContext
from forge_ray.serve_proxy.placing import Placement
from forge_ray.serve_proxy.recording import Recorder
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogError, CallLogReader, CallLogWriter
from tests.built import chains
from tests.unit.toy_chat import END, ToyReader, encode, pieces, render, say
from tests.unit.toy_session import prompt

TOOL = {"type": "function", "function": {"name": "agent", "parameters": {}}}


class Tap:
    """A recorder over the toy chat and a real log."""

    def __init__(self, directory: Path, replica: str = "r") -> None:
        self.directory = directory
        self.log = CallLogWriter(directory / "calls" / f"{replica}.jsonl")
        self.index = SessionIndex(replica, Limits())
        self.index.reader = ToyReader()
        self.recorder = Recorder(log=self.log, index=self.index, proxy=Proxy(), window=4000, version="1.0")
        self.given: list[Placement] = []

    async def call(self, body: dict[str, Any], ids: list[int], *media: str) -> None:
        context = CallContext("s", "train", "chat", "/v1/chat/completions", history=history.read("chat", body))
        place = self.recorder.find(context, prompt("chat", body), media)
        self.given.append(place)
        allowed, cap = await self.recorder.admit(context, len(place.prompt), None)
        call = await self.recorder.open(context, place, max_tokens=allowed, cap=cap, sampling={"temperature": 1.0}, masked_by_grammar=False)
        async for _ in self.recorder.follow(call, _outputs(ids), delta=True):
            pass
        self.index.delivered("s", call.id, "answer")
        await self.log.append({"event": "delivered", "call": call.id, "t": 1e12, "reply": "answer", "issued": []})

    def calls(self) -> list[Call]:
        reader = CallLogReader(self.directory / "calls")
        reader.refresh()
        return reader.session("s")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for line in self.log.path.read_text().splitlines() if (event := json.loads(line))["event"] == name]


async def _outputs(ids: list[int]) -> AsyncIterator[Any]:
    for position, token in enumerate(ids):
        await asyncio.sleep(0)
        last = position == len(ids) - 1
        spans = [SimpleNamespace(version="1.0", start=0, end=len(ids))] if last else None
        entry = {token: SimpleNamespace(logprob=-0.5)}
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=[token], logprobs=[entry], finish_reason="stop" if last else None, stop_reason=None, weight_versions=spans
                )
            ],
            finished=last,
        )


@pytest.fixture
def tap(tmp_path: Path) -> Iterator[Tap]:
    tap = Tap(tmp_path)
    yield tap
    tap.log.close()


def chat(*messages: tuple[str, str], tools: bool = True, system: str = "S") -> dict[str, Any]:
    said = [{"role": role, "content": content} for role, content in messages]
    return {"messages": [{"role": "system", "content": system}, *said], "tools": [TOOL] if tools else []}


U, A, M = ("user", "go"), ("assistant", "hello"), ("user", "more")


async def test_the_log_holds_what_was_used_and_what_was_rendered(tap: Tap) -> None:
    sampled = pieces("he", "llo", END)
    await tap.call(chat(U), sampled)
    await tap.call(chat(U, A, M), pieces("\n", "o", "k", END))
    await tap.call(chat(U, A, M, ("assistant", "\nok"), M), pieces("o", "k", END))
    one, two, three = tap.calls()
    assert [call.splice for call in (one, two, three)] == ["new", "spliced", "spliced"]
    assert two.prompt_ids == one.prompt_ids + sampled + prompt("chat", chat(U, A, M))[len(one.prompt_ids) + 2 :]
    assert (two.rerendered, two.overlap, two.parent, two.shared) == (pieces("hello", END), 0, one.id, len(one.prompt_ids) + 3)
    assert (three.rerendered, three.overlap) == (pieces("\n\n", "o", "k", END), 1)
    opened = tap.events("open")
    assert opened[1]["reason"] == "the reply came back in other tokens (token 0: 'he' became 'hello')" and opened[0]["reason"] is None
    assert len(opened[2]["new"]) == len(render([{"role": "user", "content": "more"}])) + 1  # new tokens only
    assert len(chains([one, two, three])) == 1


async def test_another_replica_goes_on_from_the_log(tap: Tap, tmp_path: Path) -> None:
    await tap.call(chat(U), pieces("he", "llo", END))
    await tap.call(chat(U, A, M), pieces("\n", "o", "k", END))
    young = Tap(tmp_path, "young")
    young.index.restore("s", tap.calls(), closed=False, limit=None)
    await young.call(chat(U, A, M, ("assistant", "\nok"), M), pieces("he", "llo", END))
    await young.call(chat(U, A, M, ("assistant", "\nok"), M, A, M), encode("end"))
    calls = young.calls()
    assert [call.splice for call in calls] == ["new", "spliced", "spliced", "spliced"] and len(chains(calls)) == 1
    assert {call.conversation for call in calls} == {calls[0].id}
    young.log.close()


async def test_a_conversation_goes_on_after_a_restart_also_where_it_forks(tap: Tap, tmp_path: Path) -> None:
    await tap.call(chat(U), encode("hello") + pieces(END))
    young = Tap(tmp_path, "young")
    young.index.restore("s", tap.calls(), closed=False, limit=None)
    await young.call(chat(U, ("assistant", "another"), M), encode("ok") + pieces(END))
    await young.call(chat(U, ("assistant", "another"), M, ("assistant", "ok"), M), encode("ok") + pieces(END))
    one, two, three = young.calls()
    assert (two.conversation, two.splice) == (one.id, "fork")
    assert two.reason == "text of the reply differs at character 0: 'hello' became 'another'"
    assert (three.conversation, three.splice) == (one.id, "exact")
    young.log.close()


async def test_the_images_of_a_prompt_are_in_the_log_and_known_after_a_restart(tap: Tap, tmp_path: Path) -> None:
    await tap.call(chat(U), encode("hello") + pieces(END), "image:1")
    await tap.call(chat(M), encode("ok") + pieces(END))
    seen, plain = tap.calls()
    assert (seen.media, seen.trainable, plain.media, plain.trainable) == (["image:1"], False, [], True)
    young = Tap(tmp_path, "young")
    young.index.restore("s", tap.calls(), closed=False, limit=None)
    await young.call(chat(U, A, M), encode("ok") + pieces(END), "image:2")
    await young.call(chat(U, A, M), encode("ok") + pieces(END), "image:1", "image:2")
    *_, other, same = young.calls()
    assert (other.splice, same.splice, same.parent) == ("fork", "exact", seen.id), "another image is another prompt"
    young.log.close()


async def test_kinds_that_are_seen_later_are_in_the_log(tap: Tap) -> None:
    await tap.call(chat(U, tools=False, system="Titles."), encode("A title") + pieces(END))
    await tap.call(chat(U), encode(say("", ("agent", '{"prompt": "look at it"}'))) + pieces(END))
    await tap.call(chat(("user", "look at it")), encode("seen") + pieces(END))
    title, main, sub = tap.calls()
    assert [call.kind for call in (title, main, sub)] == ["aux", "agent", "subagent"] and sub.spawned_by == main.id
    assert [(event["call"], event["kind"]) for event in tap.events("kind")] == [(title.id, "aux")]
    assert tap.index.state("s").counts["r"].last_kind == "agent"


async def test_a_call_that_was_lost_is_nobodys_parent(tap: Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    await tap.call(chat(U), pieces("he", "llo", END))
    body = chat(U, A, M)
    context = CallContext("s", "train", "chat", "/v1/chat/completions", history=history.read("chat", body))
    place = tap.recorder.find(context, prompt("chat", body))
    assert place.splice == "spliced" and not place.stale
    first = tap.calls()[0].id
    tap.index.drop("s", first)
    assert place.stale and tap.recorder.find(context, prompt("chat", body)).parent is None
    with monkeypatch.context() as patch:
        patch.setattr(tap.log, "_write", lambda lines: (0, CallLogError("no space left on device")))
        with pytest.raises(CallLogError):
            await tap.call(body, encode("ok"))
    assert tap.index.state("s").tree.calls == {} and tap.index.state("s").conversations.known == {}
