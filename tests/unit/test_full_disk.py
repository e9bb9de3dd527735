"""A disk that is full: what cannot be recorded is not served, in the words of its dialect, and everything goes on when there is room."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge_ray.trajectories.call_log import CallLogReader
from tests.small_disk import small_disk
from tests.unit.edge_app import Rig

Room = Callable[[int], contextlib.AbstractContextManager[None]]
"""A context in which so many bytes can still be written."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture(params=["file system", "file size"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Room]]:
    """A directory and the way to leave no room in it: a file system that is really full, or (for any user) the limit of a file's size."""
    if request.param == "file size":
        yield tmp_path, lambda left: _limit(tmp_path / "calls" / "r0.jsonl", left)
        return
    with small_disk(tmp_path / "small", 4) as place:
        yield place, lambda left: _fill(place, left)


@contextlib.contextmanager
def _limit(log: Path, left: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _fill(place: Path, left: int) -> Iterator[None]:
    """Whole pages only: what is left of the log's own last page stays."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        free = os.statvfs(place)
        file.write(b"x" * (free.f_bavail * free.f_frsize - left // 4096 * 4096))
        with contextlib.suppress(OSError):
            while left < 4096:
                file.write(b"x" * 4096)
    try:
        yield
    finally:
        filler.unlink()


def _events(rig: Rig) -> list[dict[str, Any]]:
    content = rig.log.path.read_bytes()
    assert content.endswith(b"\n") or not content, "nothing half-written"
    return [json.loads(line) for line in content.splitlines()]


async def _ask(rig: Rig, path: str, session: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.edge, raise_app_exceptions=False), timeout=30) as http:
        answer = await http.post(f"http://proxy/s/{rig.token(session)}{path}", json={"model": "policy", **BODIES[path], **body})
    assert await rig.edge.drained(session, 30)
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_no_room_for_the_call(disk: tuple[Path, Room], stream: bool) -> None:
    place, room = disk
    rig = Rig(place)
    assert (await _ask(rig, "/v1/chat/completions", "before")).status_code == 200
    page = rig.log.path.stat().st_size % 4096
    while page and page < 4096 - 200:  # leave no room for one more event in the file's last page
        await rig.log.append(
            {"event": "refused", "session": "filler", "reason": "x", "status": 400, "dialect": "chat", "path": "/", "t": 1.0}
        )
        page = page + 96
    with room(0):
        for path in BODIES:
            answer = await _ask(rig, path, "full", stream=stream)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert "cannot record calls" in error["message"] and "r0.jsonl" not in answer.text
            assert ("type" in answer.json()) == (path == "/v1/messages")
        _events(rig)
    counts = rig.index.state("full").counts["r0"]
    assert (counts.failed, counts.calls, counts.live, rig.recorder.live) == (3, 0, 0, {})
    for path in BODIES:
        assert (await _ask(rig, path, "after", stream=stream)).status_code == 200
    rig.log.close()
    reader = CallLogReader(place / "calls")
    reader.refresh()
    assert [call.trainable for call in reader.session("after")] == [True] * 3
    assert [call for call in reader.session("full") if call.trainable] == [] and reader.verify() == [] and reader.torn() == []


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_no_room_for_the_end(tmp_path: Path, stream: bool) -> None:
    """The open event is on disk, `finished` finds no room: the reply is not handed over whole, and the call is no sample."""
    rig = Rig(tmp_path)
    await _ask(rig, "/v1/chat/completions", "before")
    start = next(len(line) for line in rig.log.path.read_bytes().splitlines(keepends=True))
    with _limit(rig.log.path, start + 60):
        answer = await _ask(rig, "/v1/chat/completions", "cut", stream=stream)
        if stream:
            assert "[DONE]" not in answer.text and "token 12" in answer.text  # cut before its last event
        else:
            assert answer.status_code == 503 and "cannot record calls" in answer.json()["error"]["message"]
    assert [event["event"] for event in _events(rig)][-1] == "open"
    counts = rig.index.state("cut").counts["r0"]
    assert (counts.failed, counts.calls, counts.last_status, counts.undelivered) == (1, 0, "failed", 1)
    answer = await _ask(rig, "/v1/chat/completions", "cut", stream=stream)
    assert answer.status_code == 200
    rig.log.close()
    last, first = rig.read().session("cut")
    assert (first.status, first.trainable, last.status, last.trainable) == ("open", False, "finished", True)
