"""What the edge has written down of a request: what became of the reply, retries, bodies, and a log that cannot be written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.edge_app import BODIES, COMPLETIONS, RESPONSES, Rig, post

REPLIES = [("answer", 9, "answer"), ("tools", 9, "tool_calls"), ("answer", 2, "length"), ("tools", 2, "length")]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.log.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "script", "cap", "expected"),
    [(path, *reply) for path in BODIES for reply in REPLIES if path != COMPLETIONS or reply[0] != "tools"],  # completions have no tools
)
async def test_replies_are_classified(rig: Rig, path: str, stream: bool, script: str, cap: int, expected: str) -> None:
    field = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = await post(rig, path, stream=stream, script=script, **{field: cap})
    assert answer.status_code == 200
    assert await rig.edge.drained("g1-0.0", 60)
    (event,) = rig.events("delivered")
    assert event["reply"] == expected and event["bytes"] == len(answer.content) and event["status"] == 200
    assert event["response_sha256"] == hashlib.sha256(answer.content).hexdigest()
    assert event["usage"] is not None and 0 <= event["first_byte_s"] <= event["last_byte_s"]
    (call,) = rig.read().session("g1-0.0")
    assert call.trainable and call.reply == expected and call.streamed is stream
    order = [e["event"] for e in rig.events()]
    assert order == ["open", "length" if expected == "length" else "finished", "delivered"]


async def test_a_retry_supersedes(rig: Rig) -> None:
    for number in range(3):
        await post(rig, messages=[{"role": "user", "content": "same"}])
        await post(rig, messages=[{"role": "user", "content": f"other {number}"}])
        text = "same" if number == 0 else str(number)
        await post(rig, token=rig.token("another"), messages=[{"role": "user", "content": text}])
    calls = [call for call in rig.read().session("g1-0.0")]
    same = [call for call in calls if call.request_sha256 == calls[0].request_sha256]
    assert [call.superseded_by for call in same] == [same[1].id, same[2].id, None]
    assert [call.trainable for call in same] == [False, False, True]
    assert all(call.trainable for call in calls if call not in same)
    assert all(call.trainable for call in rig.read().session("another"))


async def test_a_retry_that_never_reached_the_engine_supersedes_nothing(rig: Rig) -> None:
    await post(rig)
    real, rig.edge._app = rig.edge._app, _broken_app
    await post(rig)
    assert rig.read().session("g1-0.0")[0].superseded_by is None
    rig.edge._app = real
    await post(rig)
    first, second = rig.read().session("g1-0.0")
    assert first.superseded_by == second.id and second.trainable


async def _broken_app(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("not now")


async def test_bodies_are_kept_where_asked(tmp_path: Path) -> None:
    rig = Rig(tmp_path, bodies=True)
    answer = await post(rig, stream=True)
    assert await rig.edge.drained("g1-0.0", 60)
    (call,) = rig.read().session("g1-0.0")
    assert (tmp_path / "bodies" / call.response_sha256).read_bytes() == answer.content
    assert json.loads((tmp_path / "bodies" / call.request_sha256).read_bytes())["model"] == "policy"
    rig.log.close()


async def test_a_stream_without_its_last_event_is_not_delivered(rig: Rig) -> None:
    with pytest.raises(RuntimeError):  # the exception cuts the connection
        await post(rig, stream=True, script="fail")
    assert await rig.edge.drained("g1-0.0", 60)
    assert [event["event"] for event in rig.events()] == ["open", "failed", "undelivered"]


async def test_a_log_that_cannot_be_written(rig: Rig) -> None:
    rig.log.close()
    answer = await post(rig)
    assert answer.status_code == 503 and "cannot record calls" in answer.text and answer.headers["retry-after"]
    assert rig.index.state("g1-0.0").report()["counts"]["r0"]["failed"] == 1
