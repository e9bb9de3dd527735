"""The engine tap around a stream of outputs: what is written, in which order, and when it is handed on."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import EvalSampling, Limits, Proxy, Sampling
from forge_ray.serve_proxy.admission import LimitReached
from forge_ray.serve_proxy.identity import CallContext
from forge_ray.serve_proxy.recording import LiveCall, PromptTooLong, Recorder, UnrecordableOutput, forced
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogError, CallLogReader, CallLogWriter


@dataclass
class Entry:
    logprob: float


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None = None
    stop_reason: Any = None
    weight_versions: Any = None


@dataclass
class Output:
    outputs: list[Completion]
    finished: bool = False


@dataclass
class Bench:
    recorder: Recorder
    log: CallLogWriter
    context: CallContext = field(default_factory=lambda: CallContext("s", "train", "chat", "/v1/chat/completions"))

    async def open(self, prompt: list[int], requested: int | None = 50) -> LiveCall:
        max_tokens, cap = await self.recorder.admit(self.context, len(prompt), requested)
        return await self.recorder.open(
            self.context, prompt, max_tokens=max_tokens, cap=cap, sampling={"temperature": 1.0}, masked_by_grammar=False
        )

    def call(self) -> Call:
        reader = CallLogReader(self.log.path.parent)
        reader.refresh()
        return reader.session("s")[-1]


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    log = CallLogWriter(tmp_path / "calls" / "r.jsonl")
    proxy = Proxy(limits=Limits(sampled_tokens=100, context_tokens=60), max_call_tokens=30)
    index = SessionIndex("r", proxy.limits)
    recorder = Recorder(log=log, index=index, proxy=proxy, window=1000, version="1.4", refusals=(LookupError,))
    yield Bench(recorder, log)
    log.close()


def step(tokens: list[int], reason: str | None = None, spans: list[Span] | None = None) -> Output:
    return Output([Completion(tokens, [{t: Entry(-t / 8), 999: Entry(-9.0)} for t in tokens], reason, None, spans)], reason is not None)


async def stream(*outputs: Any) -> AsyncIterator[Any]:
    for output in outputs:
        if isinstance(output, BaseException):
            raise output
        await asyncio.sleep(0)
        yield output


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "cumulative"])
async def test_ids_logprobs_and_spans(bench: Bench, delta: bool) -> None:
    call = await bench.open([1, 2, 3])
    spans = [Span("1.4", 0, 2), Span("1.5", 2, 3)]
    outputs = [step([5]), step([6]), step([7], "stop", spans)] if delta else [step([5]), step([5, 6]), step([5, 6, 7], "stop", spans)]
    seen = [output async for output in bench.recorder.follow(call, stream(*outputs), delta=delta)]
    assert seen == outputs
    recorded = bench.call()
    assert (recorded.ids, recorded.logprobs) == ([5, 6, 7], [-5 / 8, -6 / 8, -7 / 8])
    assert recorded.spans == [("1.4", 0, 2), ("1.5", 2, 3)]
    assert (recorded.status, recorded.prompt_ids, recorded.version_open) == ("finished", [1, 2, 3], "1.4")
    assert (bench.context.calls, bench.context.sampled_tokens, bench.context.finish_reason) == ([call.id], 3, "stop")


async def test_the_end_is_on_disk_before_the_last_output_is_handed_on(bench: Bench) -> None:
    call = await bench.open([1])
    async for output in bench.recorder.follow(call, stream(step([5]), step([6], "stop", [Span("1.4", 0, 2)])), delta=True):
        events = [json.loads(line)["event"] for line in bench.log.path.read_text().splitlines()]
        assert events == (["open", "finished"] if output.finished else ["open"])


async def test_an_output_waits_for_the_sync_and_not_only_for_the_write(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the file but not synced would be lost with the machine: nothing of a call leaves before its open event is synced, and
    its last output not before the end is."""
    may_sync, sync = threading.Semaphore(0), os.fdatasync

    def slow(file: int) -> None:
        may_sync.acquire(timeout=10)
        sync(file)

    monkeypatch.setattr("os.fdatasync", slow)
    call = await bench.open([1])
    outputs = bench.recorder.follow(call, stream(step([5]), step([6]), step([7], "stop", [Span("1.4", 0, 3)])), delta=True)
    for tokens, event in ([5], "open"), ([6], None), ([7], "finished"):
        output = asyncio.ensure_future(anext(outputs))
        if event is not None:
            while event not in bench.log.path.read_text():  # written …
                assert not output.done()
                await asyncio.sleep(0.005)
            await asyncio.wait([output], timeout=0.05)
            assert not output.done() and not call.done.is_set()  # … and not synced
            may_sync.release()
        assert (await output).outputs[0].token_ids == tokens
    may_sync.release(100)
    assert [output async for output in outputs] == []


async def test_a_consumer_that_stops_leaves_a_cancelled_call(bench: Bench) -> None:
    call = await bench.open([1])
    outputs: AsyncGenerator[Any, None] = bench.recorder.follow(call, stream(step([5]), step([6]), step([7], "stop")), delta=True)
    async with aclosing(outputs):
        await anext(outputs)
        bench.recorder.version = "1.5"
    recorded = bench.call()
    assert (recorded.status, recorded.ids, recorded.spans) == ("cancelled", [5], None)
    assert (recorded.version_open, recorded.version_end) == ("1.4", "1.5")
    assert bench.recorder.live == {} and call.done.is_set()


async def test_a_cancelled_task_leaves_a_cancelled_call(bench: Bench) -> None:
    call = await bench.open([1])
    first = asyncio.Event()

    async def hang() -> AsyncIterator[Any]:
        yield step([5])
        first.set()
        await asyncio.Event().wait()

    async def consume() -> None:
        async for _ in bench.recorder.follow(call, hang(), delta=True):
            pass

    task = asyncio.create_task(consume())
    await first.wait()
    task.cancel()
    await asyncio.wait([task])
    assert (bench.call().status, bench.call().ids) == ("cancelled", [5])


async def test_failures_and_refusals(bench: Bench) -> None:
    for error, status, prefix, ours in (
        (LookupError("bad schema"), "cancelled", "request refused", False),
        (RuntimeError("engine\ndead"), "failed", "RuntimeError: engine dead", True),
    ):
        bench.context.failed = None
        call = await bench.open([1])
        with pytest.raises(type(error)):
            async for _ in bench.recorder.follow(call, stream(step([5]), error), delta=True):
                pass
        assert bench.call().status == status and (bench.call().error or "").startswith(prefix)
        assert (bench.context.failed is not None) is ours


async def test_a_stream_without_an_end_is_a_failure(bench: Bench) -> None:
    call = await bench.open([1])
    async for _ in bench.recorder.follow(call, stream(step([5])), delta=True):
        pass
    assert bench.call().status == "failed"


@pytest.mark.parametrize("logprobs", [None, [], [{4: Entry(-1.0)}]])
async def test_a_token_without_its_logprob_is_an_error(bench: Bench, logprobs: Any) -> None:
    call = await bench.open([1])
    with pytest.raises(UnrecordableOutput):
        async for _ in bench.recorder.follow(call, stream(Output([Completion([5], logprobs)])), delta=True):
            pass
    assert bench.call().status == "failed"


async def test_caps(bench: Bench) -> None:
    assert await bench.recorder.admit(bench.context, 10, 5) == (5, "request")
    assert await bench.recorder.admit(bench.context, 10, 900) == (30, "call")
    assert await bench.recorder.admit(bench.context, 40, None) == (20, "context")
    bench.recorder.index.sampled("s", 90)
    assert await bench.recorder.admit(bench.context, 10, None) == (10, "tokens")
    with pytest.raises(PromptTooLong, match="maximum context length is 60"):
        await bench.recorder.admit(bench.context, 60, None)
    assert bench.recorder.index.state("s").limit == "context"
    bench.recorder.index.state("s").limit = None
    bench.recorder.index.sampled("s", 50)
    with pytest.raises(LimitReached):
        await bench.recorder.admit(bench.context, 10, None)
    assert bench.context.limit == bench.recorder.index.state("s").limit == "tokens"


async def test_only_a_session_limit_ends_the_session(bench: Bench) -> None:
    for prompt, limit in (([1] * 5, None), ([1] * 50, "context")):
        call = await bench.open(prompt, None)
        async for _ in bench.recorder.follow(call, stream(step([5], "length", [Span("1.4", 0, 1)])), delta=True):
            pass
        assert bench.call().status == "length"
        assert bench.context.limit == limit and bench.recorder.index.state("s").limit == limit
    assert '"status":"limit"' in bench.log.path.read_text()


def test_what_is_forced() -> None:
    sampling = Sampling(temperature=0.8)
    assert forced("train", sampling, EvalSampling(mode="harness")) == {"temperature": 0.8, "top_p": 1.0, "top_k": 0}
    assert forced("eval", sampling, EvalSampling(temperature=0.0)) == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    assert forced("eval", sampling, EvalSampling(mode="harness")) is None


async def test_a_call_whose_events_could_not_be_written_is_nobodys_parent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench.log._write

    def full_disk(lines: list[bytes]) -> tuple[int, CallLogError]:
        return 0, CallLogError("no space left on device")

    one = stream(step([5], "stop", [Span("1.4", 0, 1)]))
    for outputs in (one, stream(step([5]), step([6], "stop", [Span("1.4", 0, 2)]))):
        monkeypatch.setattr(bench.log, "_write", full_disk)
        lost = await bench.open([1, 2, 3])
        with pytest.raises(CallLogError):
            async for _ in bench.recorder.follow(lost, outputs, delta=True):
                pytest.fail("an output of a call that is not in the log")
        monkeypatch.setattr(bench.log, "_write", whole)
        assert bench.context.calls == [] and bench.context.unrecorded and lost.done.is_set()
    call = await bench.open([1, 2, 3])
    outputs = bench.recorder.follow(call, stream(step([4]), step([5], "stop", [Span("1.4", 0, 2)])), delta=True)
    await anext(outputs)
    monkeypatch.setattr(bench.log, "_write", full_disk)
    with pytest.raises(CallLogError):
        await anext(outputs)
    monkeypatch.setattr(bench.log, "_write", whole)
    again = await bench.open([1, 2, 3, 5, 6])
    async for _ in bench.recorder.follow(again, stream(step([7], "stop", [Span("1.4", 0, 1)])), delta=True):
        pass
    reader = CallLogReader(bench.log.path.parent)
    reader.refresh()
    calls = {call.id: call for call in reader.session("s")}
    assert calls[again.id].prompt_ids == [1, 2, 3, 5, 6] and calls[again.id].parent is None
    assert set(calls) == {call.id, again.id} and calls[call.id].status == "open" and not calls[call.id].trainable
