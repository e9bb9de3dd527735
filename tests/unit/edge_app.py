"""A small app behind the edge: what vLLM's does, as far as the edge can see it, with the real recorder underneath.

The request's own `script` field says how the app behaves, so that each test can ask for what it wants.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forge_ray.config import Limits, Proxy
from forge_ray.serve_proxy import identity
from forge_ray.serve_proxy.admission import Admission, NotAdmitted
from forge_ray.serve_proxy.edge import Edge, EdgeSettings
from forge_ray.serve_proxy.recording import Recorder
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.serve_proxy.sessions import Sessions
from forge_ray.serve_proxy.upstream_routes import Targets
from forge_ray.trajectories.call_log import CallLogReader, CallLogWriter

CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": USER},
    COMPLETIONS: {"model": "policy", "prompt": "hi"},
    RESPONSES: {"model": "policy", "input": "hi"},
    MESSAGES: {"model": "policy", "messages": USER, "max_tokens": 16},
}

SECRET = b"a secret of the run, 32 bytes...."
WINDOW = 64


@dataclass
class Completion:
    token_ids: Sequence[int]
    logprobs: Any
    finish_reason: str | None
    stop_reason: Any = None
    weight_versions: Any = None


@dataclass
class Output:
    outputs: Sequence[Completion]
    finished: bool


@dataclass
class Rig:
    """An edge with everything it needs, and the requests that its app saw."""

    directory: Path
    limits: Limits = field(default_factory=Limits)
    bodies: bool = False
    admission: Admission = field(default_factory=Admission)
    keepalive_s: float = 10.0
    max_body_bytes: int = 1000
    obeyed: frozenset[Any] = frozenset()
    targets: Targets | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    contexts: list[identity.CallContext] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Streams with `"script": "wait"` stop here after their first piece."""

    def __post_init__(self) -> None:
        self.sessions = Sessions(SECRET)
        self.index = SessionIndex("r0", self.limits)
        self.log = CallLogWriter(self.directory / "calls" / "r0.jsonl")
        self.recorder = Recorder(log=self.log, index=self.index, proxy=Proxy(limits=self.limits), window=WINDOW, version="0.1")
        routes = [Route(path, self.complete, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses")]
        routes += [Route("/v1/messages", self.complete, methods=["POST"]), Route("/v1/messages/count_tokens", self.count, methods=["POST"])]
        routes += [Route("/tokenize", self.count, methods=["POST"])]
        bodies = self.directory / "bodies" if self.bodies else None
        settings = EdgeSettings("policy", WINDOW, self.max_body_bytes, bodies, keepalive_s=self.keepalive_s, obeyed=self.obeyed)
        self.recorder.admission = self.admission
        app = Starlette(routes=routes)
        self.edge = Edge(
            app,
            settings=settings,
            sessions=self.sessions,
            index=self.index,
            log=self.log,
            admission=self.admission,
            targets=self.targets,
        )

    def token(self, session: str = "g1-0.0", purpose: Any = "train") -> str:
        return self.sessions.issue(session, purpose)

    def read(self) -> CallLogReader:
        reader = CallLogReader(self.directory / "calls")
        reader.refresh()
        return reader

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.path.read_text().splitlines()]
        return [event for event in lines if not kinds or event["event"] in kinds]

    async def count(self, request: Request) -> Response:
        self.seen.append(await request.json())
        return JSONResponse({"input_tokens": 3})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        context = identity.current.get()
        assert context is not None
        self.contexts.append(context)
        script = body.get("script", "answer")
        if isinstance(script, int):
            return _error(script, body.get("words", "something is wrong"))
        if script == "raise":
            raise RuntimeError("a fault of the app")
        prompt = body.get("ids", [1, 2, 3])
        cap = body.get("max_tokens") or body.get("max_completion_tokens") or body.get("max_output_tokens")
        outputs = self.generate(context, prompt, cap, script)
        if body.get("stream"):
            return StreamingResponse(self.stream(context.dialect, script, outputs), media_type="text/event-stream")
        watch = asyncio.create_task(_gone(request))
        work = asyncio.create_task(_drain(outputs))
        await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait([work])
            return JSONResponse(None)
        watch.cancel()
        try:
            work.result()
        except NotAdmitted as error:
            return _error(400, str(error))
        except RuntimeError as error:
            return _error(500, f"internals: {error}")
        return JSONResponse(_unary(context.dialect, script, context.finish_reason))

    async def generate(self, context: identity.CallContext, prompt: list[int], cap: int | None, script: str) -> AsyncGenerator[Output]:
        """What the engine tap does, once somebody asks for the first output."""
        await self.recorder.turn(context)
        allowed, bound = await self.recorder.admit(context, len(prompt), cap)
        call = await self.recorder.open(
            context, prompt, max_tokens=allowed, cap=bound, sampling={"temperature": 1.0}, masked_by_grammar=False
        )
        async with aclosing(self.recorder.follow(call, self.engine(script, allowed), delta=True)) as outputs:
            async for output in outputs:
                yield output

    async def engine(self, script: str, allowed: int) -> AsyncIterator[Output]:
        ids = [11, 12, 13]
        for position, token in enumerate(ids[:allowed]):
            last = position == min(allowed, len(ids)) - 1
            if script == "fail at once" or (script == "fail" and position == 1):
                raise RuntimeError("the engine is on fire")
            if script == "wait" and position == 1:
                await self.gate.wait()
            reason = None if not last else ("length" if allowed < len(ids) else "stop")
            spans = [SimpleNamespace(version="0.1", start=0, end=position + 1)] if last else None
            yield Output([Completion([token], [{token: SimpleNamespace(logprob=-0.5)}], reason, None, spans)], last)

    async def stream(self, dialect: str, script: str, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        async for output in outputs:
            completion = output.outputs[0]
            if output.finished:
                for event in _last(dialect, script, completion.finish_reason):
                    yield event
            else:
                yield _event(dialect, f"token {completion.token_ids[0]}")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}, status_code=status)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _drain(outputs: AsyncIterator[Output]) -> None:
    async for _ in outputs:
        pass


def _sse(value: dict[str, Any]) -> bytes:
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def _event(dialect: str, text: str) -> bytes:
    if dialect == "messages":
        return _sse({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
    if dialect == "responses":
        return _sse({"type": "response.output_text.delta", "delta": text})
    return _sse({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


def _last(dialect: str, script: str, reason: str | None) -> list[bytes]:
    body = _unary(dialect, script, reason)
    if dialect == "messages":
        end = {"type": "message_delta", "delta": {"stop_reason": body["stop_reason"]}, "usage": {"output_tokens": 3}}
        return [_sse(end), _sse({"type": "message_stop"})]
    if dialect == "responses":
        return [_sse({"type": "response.completed", "response": body})]
    choice = dict(body["choices"][0])
    choice["delta"] = choice.pop("message", {})
    return [_sse({"choices": [choice]}), _sse({"choices": [], "usage": body["usage"]}), b"data: [DONE]\n\n"]


def _unary(dialect: str, script: str, reason: str | None) -> dict[str, Any]:
    tools = script == "tools"
    if dialect == "messages":
        stop = "max_tokens" if reason == "length" else ("tool_use" if tools else "end_turn")
        content = [{"type": "tool_use", "id": "t1", "name": "bash", "input": {}}] if tools else [{"type": "text", "text": "hello"}]
        usage = {"input_tokens": 3, "output_tokens": 3}
        return {
            "id": "m1",
            "type": "message",
            "role": "assistant",
            "model": "policy",
            "content": content,
            "stop_reason": stop,
            "usage": usage,
        }
    if dialect == "responses":
        text = {"type": "message", "id": "i1", "role": "assistant", "status": "completed", "content": []}
        call = {"type": "function_call", "id": "i2", "call_id": "c2", "name": "bash", "arguments": "{}", "status": "completed"}
        status = "incomplete" if reason == "length" else "completed"
        return {"id": "r1", "object": "response", "status": status, "output": [call if tools else text], "usage": {"output_tokens": 3}}
    message: dict[str, Any] = {"role": "assistant", "content": None if tools else "hello"}
    if tools:
        message["tool_calls"] = [{"id": "t1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
    finish = "length" if reason == "length" else ("tool_calls" if tools else "stop")
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    choice = {"index": 0, "message": message, "text": "hello", "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice], "usage": usage}


def client(rig: Rig) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(rig.edge), base_url="http://proxy")


async def post(rig: Rig, path: str = CHAT, token: Any = None, **body: Any) -> httpx.Response:
    async with client(rig) as http:
        return await http.post(f"/s/{token or rig.token()}{path}", json=BODIES[path] | body)
