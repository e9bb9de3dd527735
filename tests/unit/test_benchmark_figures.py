"""The arithmetic of the proxy's benchmarks, and the conversations that they have."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.parts.conversation import NEXT, Conversation, Words
from benchmarks.parts.figures import Measured, Verdict, against_gateway, cpu_seconds, growth, percentile, slope, spent, verdicts
from benchmarks.soak import Told, check, grown
from forge_ray.trajectories.call_log import CallLogWriter


def test_percentile() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.5, 0.95, 1.0)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([7.0], 0.5) == 7.0 and math.isnan(percentile([], 0.5))


def test_slope() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2.0)
    assert slope([(0, 1), (1, 1), (2, 1)]) == slope([(1, 4), (1, 9)]) == 0.0
    assert slope([(0, 0), (1, 2), (2, 0), (3, 2)]) == pytest.approx(0.4)


def test_growth_is_that_after_the_warm_up() -> None:
    memory = [(at / 10, 100.0 + (10.0 * at if at < 40 else 400.0)) for at in range(101)]
    assert grown(memory, 10_000) == pytest.approx(0.0)
    assert grown([(at, mib + 3 * at) for at, mib in memory], 10_000) == pytest.approx(3.0)
    assert math.isnan(grown(memory[:20], 10_000))


def test_cpu_time() -> None:
    assert spent({1: 2.0, 2: 5.0}, {1: 2.5, 3: 0.25}) == pytest.approx(0.75)
    code = "import time\ninput()\nbegan = time.process_time()\nwhile time.process_time() - began < 0.2: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    before = cpu_seconds([child.pid, 2**22 + 1])
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    child.stdout.readline()
    assert 0.1 <= spent(before, cpu_seconds([child.pid])) <= 2.0
    child.communicate(b"\n")
    assert cpu_seconds([child.pid]) == {}


def measured(milliseconds: float, cpu: float, first: float = 1.0, log_bytes: int = 0, tokens: int = 0) -> Measured:
    return Measured([milliseconds / 1e3] * 10, [first / 1e3] * 10, cpu / 1e3 * 10, log_bytes, tokens)


def test_measured() -> None:
    one = Measured([0.001, 0.002, 0.003], [0.001, 0.001, 0.002], 0.03)
    assert (one.p50, one.p95, one.ttft, one.cpu, one.calls) == pytest.approx((2.0, 3.0, 1.0, 10.0, 3))
    both = one.plus(Measured([0.004], [0.004], 0.01, 8, 2))
    assert (both.calls, both.log_bytes, both.new_tokens) == (4, 8, 2) and both.cpu == pytest.approx(10.0)
    assert math.isnan(Measured([], [], 1.0).cpu)


def test_verdicts() -> None:
    plain, floor = measured(10, 8), measured(11, 9, 1.5)
    met = verdicts("x", plain, floor, measured(12.9, 9.3, 3.4), streamed=True)
    assert [one.met for one in met] == [True, True, True]
    missed = verdicts("x", plain, floor, measured(13.1, 9.5, 3.6), streamed=True)
    assert [one.met for one in missed] == [False, False, False]
    assert [one.bound for one in met] == pytest.approx([2.0, 0.4, 2.0])
    assert len(verdicts("x", plain, floor, plain, streamed=False)) == 2
    slow = verdicts("x", measured(200, 100), measured(201, 101), measured(210, 105), streamed=False)
    assert [one.bound for one in slow] == pytest.approx([10.0, 5.0]) and all(one.met for one in slow)
    assert not Verdict("nothing measured", math.nan, 1.0).met


def test_against_a_gateway() -> None:
    plain, gateway = measured(10, 8), measured(20, 28)
    assert against_gateway("x", plain, measured(12, 12.9), gateway).met
    assert not against_gateway("x", plain, measured(12, 13.1), gateway).met


def test_bytes_follow_the_new_tokens() -> None:
    short = measured(1, 1, log_bytes=3000, tokens=100)
    assert growth("x", short, measured(1, 1, log_bytes=6100, tokens=200)).met
    assert not growth("x", short, measured(1, 1, log_bytes=9000, tokens=200)).met


def test_a_conversation_extends_itself() -> None:
    words = Words("reply", {"1k": ["what", "this", "and"]})
    talk = Conversation(words, "1k", "a")
    bodies = []
    for streamed in (False, True, False):
        bodies.append(json.loads(talk.body(streamed)))
        talk.answered()
    said = [body["messages"] for body in bodies]
    assert [len(messages) for messages in said] == [4, 6, 8] and said[1][:4] == said[0] and said[2][:6] == said[1]
    assert said[1][4:] == [{"role": "assistant", "content": "reply"}, {"role": "user", "content": NEXT}]
    assert [body.get("stream", False) for body in bodies] == [False, True, False]
    assert Conversation(words, "1k", "b").body(False) != Conversation(words, "1k", "a").body(False)


async def test_the_soak_finds_what_is_lost_and_what_goes_on(tmp_path: Path) -> None:
    log, now = CallLogWriter(tmp_path / "r.jsonl"), time.time()

    async def call(name: str, status: str, delivered: bool, digest: str) -> None:
        started = {"session": "s", "purpose": "train", "replica": "r", "dialect": "chat", "path": "/", "streamed": True, "kind": "agent"}
        placed = {"conversation": "c", "request_sha256": name, "parent": None, "shared": 0, "new": [1], "sampling": {}, "max_tokens": 1}
        rest = {"masked_by_grammar": False, "version": "1", "splice": "new", "reason": None, "rerendered": None, "spawned_by": None}
        await log.append({"event": "open", "call": name, **started, "t": now, **placed, **rest, "ignored": [], "model": None})
        end = {"finish_reason": "stop", "stop_reason": None, "version": "1", "error": None}
        spans = [["1", 0, 1]] if status == "finished" else None
        await log.append({"event": status, "call": name, "t": now, "ids": [2], "logprobs": [-1.0], "spans": spans, **end})
        told = {"response_sha256": digest, "bytes": 1, "status": 200, "usage": None, "reply": "answer", "issued": []}
        event = "delivered" if delivered else "undelivered"
        await log.append({"event": event, "call": name, "t": now, **told, "first_byte_s": 0.1, "last_byte_s": 0.1})

    await call("a", "finished", True, "one")
    await call("b", "cancelled", False, "")
    await log.append({"event": "session", "session": "s", "status": "closed", "limit": None, "t": now})
    good, count = check({"s": Told(["one"], 1)}, tmp_path)
    assert good == [] and (count["calls in the log"], count["cancelled or undelivered"]) == (2, 1)
    assert check({"s": Told(["one"], 0, 1)}, tmp_path)[0] == []
    assert any("1 of 2 replies" in line for line in check({"s": Told(["one", "two"], 1)}, tmp_path)[0])
    assert any("1 calls undelivered, 0 to 0" in line for line in check({"s": Told(["one"])}, tmp_path)[0])
    assert any("1 calls undelivered, 2 to 2" in line for line in check({"s": Told(["one"], 2)}, tmp_path)[0])
    await call("c", "finished", False, "two")
    log.close()
    assert any("not cancelled" in line for line in check({"s": Told(["one"], 2)}, tmp_path)[0])
