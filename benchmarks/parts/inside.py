"""What recording itself costs: the same app, bare and recorded, called over ASGI in this process, turn and turn about.

No server, no socket, no proxy stands between, so this is the cleanest of the comparisons. `python -m benchmarks.parts.inside SPEC` prints
the rows as JSON; it is a process of its own because it imports vLLM.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
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
        self.status, self.first, self.last = 0, 0.0, 0.0
        self._whole, self._over = asyncio.Event(), asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if message.get("body"):
            self.first = self.first or time.perf_counter()
        if not message.get("more_body", False):
            self.last = time.perf_counter()
            self._whole.set()

    async def run(self, app: Any) -> tuple[float, float]:
        """Seconds to the last byte and to the first."""
        began = time.perf_counter()
        self.task = asyncio.create_task(app(self.scope, self.receive, self.send))
        await self._whole.wait()
        if self.status != 200:
            raise RuntimeError(f"{self.scope['path']}: HTTP {self.status}")
        self._over.set()
        return self.last - began, self.first - began


@dataclass
class Side:
    """One of the two apps, and what was measured of it."""

    name: str
    app: Any
    calls: list[tuple[float, float]] = field(default_factory=list)
    """Seconds to the last and to the first byte."""
    cpu_s: float = 0.0
    """Of all threads, the calls' last events included."""
    log_bytes: int = 0

    async def begin(self, words: Words, size: str, name: str, streamed: bool) -> None:
        """A new conversation; its first calls are not measured."""
        self._talk, self._streamed = Conversation(words, size, name), streamed
        self._path = f"/s/{token(name)}{PATH}" if self.name == "recorded" else PATH
        await self._calls(UNMEASURED)

    async def go_on(self, turns: int, run: RunDir) -> None:
        """So many calls of it."""
        cpu, logged = time.process_time(), log_bytes(run)
        self.calls += await self._calls(turns)
        self.cpu_s += time.process_time() - cpu
        self.log_bytes += log_bytes(run) - logged

    async def _calls(self, turns: int) -> list[tuple[float, float]]:
        tasks, found = [], []
        for _ in range(turns):
            call = Call(self._path, self._talk.body(self._streamed))
            found.append(await call.run(self.app))
            tasks.append(call.task)
            self._talk.answered()
        await asyncio.gather(*tasks)
        return found


async def compare(words: Words, model: Path, plan: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of figures; `plan`: calls by size of the history."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="forge-ray-bench-") as name:
        directory = Path(name)
        config, run = make_config(directory, model, scripted(words), 18751), make_run(directory / "run")
        bare = await bare_app(config)
        async with recorded_app(config, run) as recorded:
            gc.collect()
            gc.freeze()  # as vLLM's and Serve's servers do
            for size, calls in plan.items():
                # The longer a call, the sooner it is the other's turn: what a machine does drifts by more than recording costs.
                together = TURNS if size == "1k" else 2
                for streamed in (False, True):
                    sides = [Side("bare", bare), Side("recorded", recorded)]
                    for session in range(-(-calls // TURNS)):
                        for side in sides:
                            await side.begin(words, size, f"{size}-{streamed}-{session}", streamed)
                        for turn in range(0, TURNS, together):
                            for side in sides if turn // together % 2 else sides[::-1]:
                                await side.go_on(together, run)
                    row = {side.name: {"calls": side.calls, "cpu_s": side.cpu_s} for side in sides}
                    rows.append({"size": size, "streamed": streamed, "log_bytes": sides[1].log_bytes, **row})
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
