"""What recording itself costs: the same app, bare and recorded, called over ASGI in this process, turn and turn about.

No server, no socket, no proxy stands between, so this is the cleanest of the comparisons. `python -m benchmarks.parts.inside SPEC` prints
the rows as JSON; it is a process of its own because it imports vLLM.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.parts.asgi import bare_app, make_config, make_run, recorded_app, scripted, token
from benchmarks.parts.conversation import Conversation, Words
from forge_ray.run_dir import RunDir

PATH = "/v1/chat/completions"
TURNS = 16
"""Calls of a session that are measured; so a history stays about as long as it says."""
UNMEASURED = 2
"""Calls of a session before them: the first one brings the whole history."""


class Call:
    """One request over ASGI."""

    def __init__(self, path: str, body: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._body: bytes | None = body
        self.status, self.size, self.first = 0, 0, 0.0
        self._over = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.first = self.first or time.perf_counter()
            self.size += len(message["body"])

    async def run(self, app: Any) -> tuple[float, float, float]:
        """Seconds to the last byte, to the first, and of CPU (all threads of this process)."""
        cpu, began = time.process_time(), time.perf_counter()
        await app(self.scope, self.receive, self.send)
        ended = time.perf_counter()
        self._over.set()
        await asyncio.sleep(0)
        if self.status != 200:
            raise RuntimeError(f"{self.scope['path']}: HTTP {self.status}")
        return ended - began, self.first - began, time.process_time() - cpu


class Side:
    """One of the two apps, and its conversation."""

    def __init__(self, name: str, app: Any) -> None:
        self.name, self._app = name, app
        self.calls: list[tuple[float, float, float]] = []

    def begin(self, words: Words, size: str, session: str) -> None:
        """Start the conversation of a new session."""
        self._conversation = Conversation(words, size, session)
        self._path = f"/s/{token(session)}{PATH}" if self.name == "recorded" else PATH

    async def call(self, streamed: bool, *, measured: bool) -> None:
        """The conversation's next turn."""
        figures = await Call(self._path, self._conversation.body(streamed)).run(self._app)
        self._conversation.answered()
        if measured:
            self.calls.append(figures)


async def compare(words: Words, model: Path, plan: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of figures; `plan`: calls by size of the history."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="forge-ray-bench-") as name:
        directory = Path(name)
        config, run = make_config(directory, model, scripted(words), 18751), make_run(directory / "run")
        bare = await bare_app(config)
        async with recorded_app(config, run) as recorded:
            sides: list[Side] = [Side("bare", bare), Side("recorded", recorded)]
            for size, calls in plan.items():
                for streamed in (False, True):
                    for side in sides:
                        side.calls = []
                    logged = 0
                    for session in range(-(-calls // TURNS)):
                        for side in sides:
                            side.begin(words, size, f"{size}-{streamed}-{session}")
                        for turn in range(UNMEASURED + min(TURNS, calls - session * TURNS)):
                            before = log_bytes(run)
                            for side in sides if turn % 2 else sides[::-1]:
                                await side.call(streamed, measured=turn >= UNMEASURED)
                            logged += log_bytes(run) - before if turn >= UNMEASURED else 0
                    row = {side.name: side.calls for side in sides}
                    rows.append({"size": size, "streamed": streamed, "log_bytes": logged, **row})
    return rows


def log_bytes(run: RunDir) -> int:
    """Size of the call log."""
    return sum(file.stat().st_size for file in run.calls.glob("*.jsonl"))


def main() -> int:
    spec = json.loads(sys.argv[1])
    words = Words(**spec["words"]) if isinstance(spec["words"], dict) else Words(**json.loads(Path(spec["words"]).read_text()))
    import uvloop

    rows = uvloop.run(compare(words, Path(spec["model"]), spec["plan"]))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
