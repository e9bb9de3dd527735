"""Two replicas: sessions stick and survive the loss of theirs, a key alone is enough, updates reach both or none, a drain loses nothing.
In the end all that Ray runs on the node is killed: whatever a client saw the end of is in the log, and the next start goes on from it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from forge_ray.serve_proxy.weights import current as current_weights
from tests.fault.serving import Serving
from tests.tiny_model import tiny_model

pytestmark = pytest.mark.timeout(900)
PORT = int(os.environ.get("FORGE_RAY_TEST_PORT", "18710"))
EIGHT = "one two three four five six seven eight"
RULES = [
    {"if": "hello", "say": EIGHT, "delay_s": 0.02},
    {"if": "slowly", "say": "one two three four five six seven eight nine ten " * 4, "delay_s": 0.2},
    {"turn": 0, "say": "The first answer."},
    {"turn": 1, "say": "The second answer."},
    {"say": "A later answer."},
]
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("two")
    with Serving(directory, PORT, rules=RULES, proxy={"replicas": 2, "limits": {"calls": 30}, "drain_s": 120}) as serving:
        yield serving


async def turn(serving: Serving, session: str, messages: Messages, **options: Any) -> Messages:
    """One turn: the history with the reply and another user message. Goes on asking as a harness does while a replica is lost."""
    end = time.monotonic() + 300
    while True:
        try:
            answer = await serving.chat(session, messages, **options)
            if answer.status_code == 200:
                break
            assert answer.status_code >= 500, answer.text
        except httpx.TransportError:
            pass
        assert time.monotonic() < end
        await asyncio.sleep(0.3)
    said = answer.json()["choices"][0]["message"]["content"]
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": f"go on after {said}"}]


def first(session: str) -> Messages:
    return [{"role": "user", "content": f"the task of {session}"}]


def replicas(serving: Serving) -> set[str]:
    """Those that ever came up: each opens a log of its own."""
    return {file.name.partition(".")[0] for file in serving.run.calls.iterdir()}


async def told(serving: Serving, session: str) -> list[Any]:
    """The session's calls, once it is known of every ended one whether it arrived (that is written after the last byte)."""
    while any(call.delivered is None and call.status != "open" for call in serving.calls(session)):
        await asyncio.sleep(0.02)
    return serving.calls(session)


async def chained(serving: Serving, session: str) -> list[Any]:
    """The session's answered calls, each of which goes on from the one before it, token for token."""
    calls = [call for call in await told(serving, session) if call.status == "finished" and call.superseded_by is None]
    for before, after in itertools.pairwise(calls):
        whole = before.prompt_ids + before.ids
        assert (after.parent, after.shared, after.conversation) == (before.id, len(whole), before.conversation)
        assert after.prompt_ids[: len(whole)] == whole and len(after.prompt_ids) > len(whole)
        assert (before.splice, after.splice) in (("new", "exact"), ("exact", "exact")) and after.trainable
    return calls


async def placed(serving: Serving, replica: str | None, name: str) -> tuple[str, Messages]:
    """A session whose path leads to `replica` (None: to any), after its first turn."""
    for number in range(60):
        session = f"{name}-{number}.0"
        messages = await turn(serving, session, first(session))
        if replica in (None, serving.calls(session)[0].replica):
            return session, messages
    raise AssertionError("every session went to the same replica")


async def test_sessions_stick(two: Serving) -> None:
    sessions = [f"stick-{number}.0" for number in range(10)]
    homes = set()
    for session in sessions:
        messages = first(session)
        for _ in range(3):
            messages = await turn(two, session, messages)
        calls = await chained(two, session)
        assert len(calls) == 3 and len({call.replica for call in calls}) == 1
        homes.add(calls[0].replica)
    assert len(homes) == 2
    for session in sessions:
        assert two.do("close", session)["calls"] == 3


async def test_a_key_alone_is_recorded_into_the_same_conversation(two: Serving) -> None:
    anchor = "anchor.0"
    await turn(two, anchor, first(anchor), key_only=True)
    (where,) = {call.replica for call in two.calls(anchor)}
    other = next(status["replica"] for status in two.do("status") if status["replica"] != where)
    session, messages = await placed(two, other, "key")
    for key_only in (True, True, False, True, False):
        messages = await turn(two, session, messages, key_only=key_only)
    calls = await chained(two, session)
    assert [call.replica for call in calls] == [other, where, where, other, where, other]
    # The same body again, at the other replica: what it gave first is replaced.
    repeated = messages[:-2]
    await turn(two, session, repeated, key_only=True)
    *_, earlier, later = await told(two, session)
    assert (earlier.replica, later.replica, earlier.superseded_by, later.superseded_by) == (other, where, later.id, None)
    assert earlier.prompt_ids == later.prompt_ids and not earlier.trainable and later.trainable
    summary = two.do("close", session)
    assert (summary["calls"], summary["failed"], summary["last_reply"]) == (7, 0, "answer")
    for key_only in (True, False):
        answer = await two.chat(session, first(session), key_only=key_only)
        assert answer.status_code == 403 and "closed" in answer.text
    limited, messages = await placed(two, other, "limited")
    for number in range(29):
        await turn(two, limited, first(limited), key_only=bool(number % 2))
    assert (await two.chat(limited, first(limited), key_only=True)).status_code == 400
    assert (await two.chat(limited, first(limited))).status_code == 400
    assert two.do("close", limited)["limit"] == "calls"


async def test_an_update_reaches_both_or_none(two: Serving, tmp_path: Path) -> None:
    def versions() -> set[str]:
        return {status["version"] for status in two.do("status")}

    def current() -> str | None:
        return (current_weights(two.run) or (None, None))[0]

    for version in ("1.1", "1.2"):
        good = shutil.copy(next(Path(tiny_model()).glob("*.safetensors")), two.run.weights / f"{version}.safetensors")
        told = two.do("switch", str(good), version, 300)
        assert (told["replicas"], told["replaced"], versions(), current()) == (2, [], {version}, version)
    torn = tmp_path / "1.3.safetensors"
    torn.write_bytes(Path(good).read_bytes()[:1000])
    with pytest.raises(RuntimeError, match=r"WeightMismatch"):
        two.do("switch", str(torn), "1.3", 300)
    assert (versions(), current()) == ({"1.2"}, "1.2"), "what cannot be loaded is refused by all before any has switched"
    slow, other = two.do("status")
    os.kill(slow["pid"], signal.SIGSTOP)
    good = shutil.copy(good, two.run.weights / "1.4.safetensors")
    two.ask("switch", str(good), "1.4", 5)
    assert current() == "1.2", "nothing is decided while one is not ready"
    told = two.answer()
    assert (told["replicas"], told["replaced"], versions(), current()) == (2, [slow["replica"]], {"1.4"}, "1.4")
    assert {status["replica"] for status in two.do("status")} & {slow["replica"], other["replica"]} == {other["replica"]}
    good = shutil.copy(good, two.run.weights / "1.5.safetensors")
    two.ask("switch", str(good), "1.5", 300)
    os.kill(other["pid"], signal.SIGKILL)
    assert two.answer()["replicas"] == 2
    assert (versions(), current()) == ({"1.5"}, "1.5")
    assert two.do("switch", str(good), "1.5", 300)["paused_s"] is None, "idempotent"


async def test_a_session_survives_its_replica(two: Serving) -> None:
    closed = "closed-before.0"
    await turn(two, closed, first(closed))
    two.do("close", closed)
    home = next(status for status in two.do("status"))
    known = replicas(two)
    session, messages = await placed(two, home["replica"], "survivor")
    messages = [*messages[:-1], {"role": "user", "content": "go on slowly"}]
    cut = asyncio.create_task(two.chat(session, messages))
    while len(two.calls(session)) < 2:
        assert not cut.done()
        await asyncio.sleep(0.05)
    os.kill(home["pid"], signal.SIGKILL)
    with contextlib.suppress(httpx.TransportError):
        assert (await cut).status_code >= 500
    for _ in range(3):  # the first of them is the same request again
        messages = await turn(two, session, messages)
    calls = await chained(two, session)
    assert len(calls) == 4 and calls[0].replica == home["replica"] != calls[1].replica
    # Nothing asks the control plane until the successor is there: it hears of it all the same.
    end = time.monotonic() + 300
    while replicas(two) == known:
        assert time.monotonic() < end, "no successor came up"
        await asyncio.sleep(0.2)
    (lost,) = [call for call in two.calls(session) if call.status == "open"]
    assert (lost.parent, lost.prompt_ids) == (calls[0].id, calls[1].prompt_ids) and lost.superseded_by == calls[1].id
    summary = two.do("close", session)
    assert (summary["calls"], summary["failed"]) == (4, 1), "the call that was lost with its replica is counted once"
    assert two.reader().verify() == []
    for key_only in (True, False):
        assert (await two.chat(closed, first(closed), key_only=key_only)).status_code == 403


async def test_a_drain_loses_no_call(two: Serving) -> None:
    homes = [status["replica"] for status in two.do("status")]
    slow: dict[str, asyncio.Task[httpx.Response]] = {}
    for home in homes:
        session, messages = await placed(two, home, f"drain{homes.index(home)}")
        slow[session] = asyncio.create_task(two.chat(session, [*messages, {"role": "user", "content": "slowly"}], stream=True))
    while not all(len(two.calls(session)) == 2 for session in slow):
        await asyncio.sleep(0.05)
    two.do("scale", 1)
    left = {}
    while len(left) != 1:
        left = {status["replica"]: status for status in two.do("status") if status["replica"] in homes}
        if all(task.done() for task in slow.values()):
            break
        for number in range(3):  # new requests are served meanwhile
            await turn(two, f"meanwhile-{number}.0", first("meanwhile"))
    for session, task in slow.items():
        answer = await task
        assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")
        *_, call = await told(two, session)
        assert (call.status, call.delivered, len(call.ids) > 40) == ("finished", True, True)
        assert two.do("close", session)["failed"] == 0


async def _client(serving: Serving, number: int, seen: dict[str, tuple[str, bool]]) -> None:
    """Asks until the node is gone; notes what came of every session and whether it came to its end."""
    async with httpx.AsyncClient(timeout=60) as http:
        for turn in itertools.count():
            session, stream = f"client{number}-turn{turn}.0", turn % 2 == 0
            body = {"model": "policy", "stream": stream, "messages": [{"role": "user", "content": f"hello {session}"}]}
            seen[session] = ("", False)
            try:
                async with http.stream("POST", serving.url(session) + "/v1/chat/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        text, _ = seen[session]
                        if line == "data: [DONE]":
                            seen[session] = (text, True)
                        elif stream and line.startswith("data: "):
                            seen[session] = (text + (json.loads(line[6:])["choices"][0]["delta"].get("content") or ""), False)
                        elif not stream and line:
                            seen[session] = (json.loads(line)["choices"][0]["message"]["content"], True)
            except (httpx.TransportError, ValueError, KeyError):
                return


async def test_what_a_client_saw_is_in_the_log_when_the_node_is_gone(two: Serving) -> None:
    """The last of the tests on `two`."""
    from transformers import AutoTokenizer

    seen: dict[str, tuple[str, bool]] = {}
    clients = [asyncio.create_task(_client(two, number, seen)) for number in range(6)]
    while sum(done for _, done in seen.values()) < 60:
        assert not all(client.done() for client in clients)
        await asyncio.sleep(0.01)
    parts = [part for part in (psutil.Process(two.process.pid), *two.seen()) if part.is_running()]
    names = {process.name() for process in parts}
    assert {"raylet", "gcs_server"} <= names, names
    for process in parts:  # in one go, the parents first, so that nothing is restarted
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    await asyncio.gather(*clients)
    await asyncio.to_thread(psutil.wait_procs, parts, 60)

    reader, tokenizer = two.reader(), AutoTokenizer.from_pretrained(tiny_model())
    assert reader.verify() == []
    finished = {session: text for session, (text, done) in seen.items() if done}
    assert len(finished) >= 60
    for session, text in finished.items():
        (call,) = reader.session(session)
        assert call.status == "finished" and len(call.ids) == len(call.logprobs)
        assert tokenizer.decode(call.ids, skip_special_tokens=True) == text == EIGHT
    statuses = {call.status for session in seen for call in reader.session(session)}
    assert "open" in statuses, "some were under way"
    closing = next(iter(finished))
    under_way = next(s for s in seen if any(call.status == "open" for call in reader.session(s)))

    with Serving(two.directory, PORT + 1, rules=RULES, again=True) as serving:
        # Its name still finds it: the new cluster's replica reads what the dead one recorded when it meets the session.
        assert (await serving.chat(closing, [{"role": "user", "content": f"hello {closing}"}])).status_code == 200
        before, after = serving.calls(closing)
        assert before.replica != after.replica and serving.do("close", closing)["calls"] == 2
        summary = serving.do("close", under_way)
        assert (summary["failed"], summary["calls"]) == (1, 0)


async def test_serves_default_proxy(tmp_path: Path) -> None:
    """Without HAProxy nothing sticks: every turn may reach another replica, and the conversation is one all the same."""
    environment = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": ""}
    with Serving(tmp_path, PORT + 3, environment=environment, rules=RULES, proxy={"replicas": 2}) as serving:
        replicas = set()
        for number in range(4):
            session, messages = f"default-{number}.0", first(f"default-{number}")
            for step in range(5):
                messages = await turn(serving, session, messages, key_only=step % 2 == 1)
            calls = await chained(serving, session)
            assert len(calls) == 5
            replicas |= {call.replica for call in calls}
            assert serving.do("close", session)["calls"] == 5
        assert len(replicas) == 2
