"""Ten thousand streamed calls through the proxy: does it leak, and does it lose anything? `python -m benchmarks.soak`.

Several hundred sessions are opened, used and closed, a tenth of the requests is left by its client at a random point (before the first byte
or within the reply), and the weights are updated twice a minute under running calls (the scripted engine changes its version, all around
it is real: pause, waiting, resume). At the end

- every reply that a client saw the end of is in the log, once, finished and delivered, by the digest of its bytes;
- every reply that a client left is there cancelled or undelivered, and was aborted in the engine;
- nothing runs or waits in the replica, and no session is open;
- the replica's memory has not grown since the warm-up.

Prints a table; exit code 1 if something of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.parts.asgi import make_config, make_run, token
from benchmarks.parts.conversation import TOOLS
from benchmarks.parts.figures import percentile, slope
from benchmarks.parts.load import Connection, Refused, connect
from benchmarks.parts.processes import free_ports
from benchmarks.parts.served import start_ray
from forge_ray import ray_env
from forge_ray.trajectories.call_log import CallLogReader
from tests.tiny_model import tiny_model

LEAVING, UPDATE_S, TURNS = 0.1, 30.0, 25
GROWTH = 1.0
"""MiB that the replica may grow by per 1000 calls after the warm-up: what is kept of 40 closed sessions, and the noise of an allocator."""
WARM = 0.4
"""Share of the calls that warms up."""
REPLY = "I read the file, change the name of the value and run the tests again."
LONG = " ".join(f"Line {line} is fine." for line in range(80))
RULES: list[dict[str, Any]] = [{"if": "(leave)", "say": LONG, "delay_s": 0.01}, {"say": REPLY, "delay_s": 0.02}]
"""Who leaves does so long before the reply's end, so that its call must be aborted."""


@dataclass
class Told:
    """What the clients saw of one session."""

    whole: list[str] = field(default_factory=list)
    """Digest of each reply that came to its end."""
    left: int = 0
    """Replies left after their first byte."""
    left_early: int = 0
    """Requests left before that: the engine may not have been asked."""


@dataclass
class Soak:
    """One run of it."""

    client: Any
    calls: int
    random: random.Random
    told: dict[str, Told] = field(default_factory=dict)
    done: int = 0
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """(thousand calls, MiB) of the replica."""
    updates: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def worker(self) -> None:
        while self.done < self.calls:
            name = f"soak-{len(self.told)}.0"
            told = self.told[name] = Told()
            await self.session(name, told)
            summary = await self.client.close_session(name)
            if summary.calls != len(told.whole):
                self.wrong.append(f"{name}: {summary.calls} calls ended, {len(told.whole)} replies came to their end")

    async def session(self, name: str, told: Told) -> None:
        """The calls of one session."""
        path = f"/s/{token(name)}/v1/chat/completions"
        messages: list[dict[str, str]] = [{"role": "system", "content": f"Your workspace is /workspace/{name}."}]
        connection = await connect(self.client.base_url)
        for turn in range(TURNS):
            if self.done >= self.calls:
                break
            self.done += 1
            leaving = self.random.random() < LEAVING
            said = {"role": "user", "content": f"{'(leave)' if leaving else 'Go on.'} {turn}"}
            body = {"model": "policy", "stream": True, "tools": TOOLS[:1], "messages": [*messages, said]}
            ask = asyncio.create_task(connection.ask(path, "", json.dumps(body).encode()))
            await asyncio.sleep(0)  # the request is on its way
            if leaving:
                await self._leave(connection, ask, told)
                connection = await connect(self.client.base_url)
                continue
            began = time.perf_counter()
            try:
                await ask
            except Refused as error:
                self.wrong.append(f"{name}: {error}")
                connection = await connect(self.client.base_url)
                continue
            self.seconds.append(time.perf_counter() - began)
            content = connection.content()
            if connection.status != 200 or not content.endswith(b"data: [DONE]\n\n"):
                self.wrong.append(f"{name}: {connection.status} {content[-200:]!r}")
                continue
            told.whole.append(hashlib.sha256(content).hexdigest())
            messages += [said, {"role": "assistant", "content": REPLY}]
        connection.close()

    async def _leave(self, connection: Connection, ask: asyncio.Task[None], told: Told) -> None:
        """Go away at a random point: at once, or after so much of the reply."""
        if self.random.random() < 0.2:
            await asyncio.sleep(self.random.random() * 0.02)
        else:
            some = self.random.randrange(1, 8000)
            while (not connection.first or len(connection.buffer) < some) and not ask.done():
                await asyncio.sleep(0.002)
        if ask.done():
            self.wrong.append(f"a reply that was to be left has ended: {ask.exception()}")
        told.left += bool(connection.first)
        told.left_early += not connection.first
        connection.close()
        await asyncio.wait([ask])
        ask.exception()

    async def update(self, weights: str) -> None:
        """New weights, twice a minute, for as long as it runs."""
        while True:
            await asyncio.sleep(UPDATE_S)
            report = await self.client.update_weights(weights, f"1.{len(self.updates) + 1}")
            self.updates.append(report["seconds"])

    async def watch(self, pid: int) -> None:
        """Sample the replica's memory."""
        process = psutil.Process(pid)
        while True:
            self.memory.append((self.done / 1e3, process.memory_info().rss / 2**20))
            await asyncio.sleep(1)


def grown(memory: list[tuple[float, float]], calls: int) -> float:
    """MiB per 1000 calls after the warm-up, by a straight line through all samples; NaN if there are too few."""
    later = [point for point in memory if point[0] * 1e3 > WARM * calls]
    return slope(later) if len(later) > 2 else float("nan")


def check(told: dict[str, Told], directory: Path) -> tuple[list[str], dict[str, float]]:
    """Compare the log with what the clients saw."""
    reader = CallLogReader(directory)
    reader.refresh()
    wrong: list[str] = [str(problem) for problem in reader.problems]
    count = {"calls in the log": 0.0, "finished and delivered": 0.0, "cancelled or undelivered": 0.0, "across an update": 0.0}
    for name, seen in told.items():
        calls = reader.session(name)
        whole = sorted(call.response_sha256 for call in calls if call.status == "finished" and call.delivered)
        others = [call for call in calls if not (call.status == "finished" and call.delivered)]
        if whole != sorted(seen.whole):
            lost = len(set(seen.whole) - set(whole))
            wrong.append(f"{name}: {lost} of {len(seen.whole)} replies that came to their end are not in the log as such")
        if not seen.left <= len(others) <= seen.left + seen.left_early:
            wrong.append(f"{name}: {len(others)} calls undelivered, {seen.left} to {seen.left + seen.left_early} were left")
        bad = [call.status for call in others if call.status != "cancelled" or call.delivered is not False]
        if bad:
            wrong.append(f"{name}: replies that were left are {sorted(set(bad))} in the log, not cancelled and undelivered")
        if not reader.state(name).closed:
            wrong.append(f"{name}: not closed in the log")
        count["calls in the log"] += len(calls)
        count["finished and delivered"] += len(whole)
        count["cancelled or undelivered"] += len(others)
        count["across an update"] += sum(len(call.spans or ()) > 1 for call in calls)
    return wrong, count


async def soak(client: Any, weights: str, calls: int, concurrency: int, seed: int) -> Soak:
    """All calls, then a look at what is left."""
    run = Soak(client, calls, random.Random(seed))
    [status] = await client.status()
    beside = [asyncio.create_task(run.update(weights)), asyncio.create_task(run.watch(status["pid"]))]
    await asyncio.gather(*(run.worker() for _ in range(concurrency)))
    for task in beside:
        if task.done():
            run.wrong.append(f"{task.exception()!r}")
        task.cancel()
    await asyncio.wait(beside)
    pid = status["pid"]
    [status] = await client.status()
    if status["pid"] != pid:
        run.wrong.append("the replica was replaced")
    run.wrong += [f"{status[name]} {name} at the end" for name in ("live", "running", "waiting", "open_sessions") if status[name]]
    return run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Ten thousand calls through the proxy.")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures by name")
    given = parser.parse_args()
    ray_env.apply()
    root, model = Path(tempfile.mkdtemp(prefix="fr-soak-")), tiny_model()
    try:
        port = free_ports()[0]
        start_ray(port, str(root / "r"))
        import ray

        from forge_ray.serve_proxy import deployment

        config, run = make_config(root, model, RULES, port), make_run(root / "run")
        client = deployment.start(config, run, str(model), 1)
        began = time.monotonic()

        async def work() -> tuple[Soak, float]:
            found = await soak(client, str(model / "model.safetensors"), given.calls, given.concurrency, given.seed)
            seconds = time.monotonic() - began
            await asyncio.to_thread(deployment.stop, client.app)  # while the loop of its handle still runs
            return found, seconds

        found, seconds = asyncio.run(work())
        wrong, count = check(found.told, run.calls)
        wrong += found.wrong
        ray.shutdown()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    growth = grown(found.memory, given.calls)
    if not growth <= GROWTH:
        wrong.append(f"the replica grows by {growth:.2f} MiB per 1000 calls (bound {GROWTH})")
    figures = {
        "calls": found.done,
        "seconds": seconds,
        "sessions": len(found.told),
        "left by their client": sum(told.left + told.left_early for told in found.told.values()),
        **count,
        "weight updates": len(found.updates),
        "longest weight update, s": max(found.updates, default=0.0),
        "p50 of a whole reply, ms": percentile(found.seconds, 0.5) * 1e3,
        "p95 of a whole reply, ms": percentile(found.seconds, 0.95) * 1e3,
        "memory after the warm-up, MiB": next((mib for at, mib in found.memory if at * 1e3 > WARM * given.calls), float("nan")),
        "memory at the end, MiB": found.memory[-1][1],
        "growth, MiB per 1000 calls": growth,
    }
    print("\n| soak | |\n|---|---|\n" + "\n".join(f"| {name} | {value:,.2f} |".replace(".00 |", " |") for name, value in figures.items()))
    print("\n" + ("\n".join(wrong[:30]) if wrong else "nothing lost, nothing left, nothing grown"))
    if given.json:
        named = {f"soak.{name}".replace(", ", "_").replace(" ", "_"): value for name, value in figures.items()}
        given.json.write_text(json.dumps({**named, "soak.problems": len(wrong)}, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
