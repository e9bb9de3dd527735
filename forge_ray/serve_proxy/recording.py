"""The engine tap: what every engine of ours does around its `generate`, whatever samples the tokens.

A call goes through three steps: `admit` (how many tokens may it sample), `open` (its place in the session, the open event) and `follow`
(the outputs, the end event). `follow` hands on no output before the open event is on disk, and the last one only when `finished` or
`length` is, so nothing leaves the replica that a crash could lose. A consumer that goes away closes the generator: then `cancelled` is
appended, shielded from the cancellation itself, with the tokens seen so far and the weight version at both ends.

Outputs are vLLM's `RequestOutput`s; only the attributes named in `Output` and `Completion` are read, so this file needs no vLLM.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from forge_ray.config import EvalSampling, Proxy, Sampling
from forge_ray.errors import ForgeRayError
from forge_ray.rollout import Purpose
from forge_ray.serve_proxy.admission import Admission, LimitReached, NotAdmitted, SessionClosed
from forge_ray.serve_proxy.identity import CallContext, Limit
from forge_ray.serve_proxy.placing import Asked, Placement
from forge_ray.serve_proxy.session_index import SessionIndex, session_event
from forge_ray.trajectories.call_log import CallLogError, CallLogWriter

Cap = Literal["request", "call", "tokens", "context", "window"]
"""What bounds the output of a call: the harness's own cap, `proxy.max_call_tokens`, the session's limits of tokens and of context, the
engine's window. Only the session's limits end the session."""


class PromptTooLong(NotAdmitted):
    """The prompt leaves no room for one sampled token."""

    status, code, reason = 400, "context_length_exceeded", "overflow"

    def __init__(self, prompt_tokens: int, window: int) -> None:
        self.prompt_tokens, self.window = prompt_tokens, window
        super().__init__(
            f"This model's maximum context length is {window} tokens. However, your prompt contains {prompt_tokens} input tokens. "
            "Please reduce the length of the input prompt."
        )


class UnrecordableOutput(ForgeRayError):
    """The engine's output cannot be recorded faithfully: a token without its logprob."""


class Completion(Protocol):
    """The part of vLLM's `CompletionOutput` that is recorded."""

    token_ids: Sequence[int]
    logprobs: Any
    """Per token a mapping id -> object with `.logprob`, of the same tokens as `token_ids`."""
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: Any
    """With the last output: spans with `.version`, `.start`, `.end` over all tokens; else None."""


class Output(Protocol):
    """The part of vLLM's `RequestOutput` that is read."""

    @property
    def outputs(self) -> Sequence[Completion]: ...
    @property
    def finished(self) -> bool: ...


class EndedByUpdate(ForgeRayError):
    """The call was given up for a weight update (`train.sync.pause: abort`); what was sampled is no whole reply."""


O = TypeVar("O", bound=Output)  # noqa: E741


def forced(purpose: Purpose, sampling: Sampling, evaluation: EvalSampling) -> dict[str, Any] | None:
    """The sampling parameters that replace the request's; None: the harness's own hold (evaluation with `mode: harness`)."""
    if purpose == "train":
        return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    if evaluation.mode == "fixed":
        return {"temperature": evaluation.temperature, "top_p": evaluation.top_p, "top_k": evaluation.top_k}
    return None


@dataclass(eq=False)
class LiveCall:
    """A call between `open` and its end event."""

    id: str
    context: CallContext
    prompt_tokens: int
    max_tokens: int
    cap: Cap
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    opened: asyncio.Future[None] | None = None
    """Its open event on its way to the disk; None: it is there."""
    ended: bool = False
    given_up: bool = False
    """A weight update is ending it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the end event is on disk."""


class Recorder:
    """Records the calls of one replica. Used from the replica's event loop only.

    `version` is the label of the weights that the engine has committed; whoever updates the engine sets it. `refusals` are the engine's
    exception classes that mean "this request is invalid" and not "the engine failed".
    """

    def __init__(
        self,
        *,
        log: CallLogWriter,
        index: SessionIndex,
        proxy: Proxy,
        window: int,
        version: str,
        refusals: tuple[type[BaseException], ...] = (),
    ) -> None:
        self.log, self.index, self.proxy, self.engine_window = log, index, proxy, window
        self.version = version
        self.refusals = refusals
        self.admission: Admission | None = None
        """Where the requests wait; None: nothing bounds them."""
        self.live: dict[str, LiveCall] = {}
        self.calls = 0
        self.sampled_tokens = 0
        self._ends: set[asyncio.Task[None]] = set()

    async def turn(self, context: CallContext) -> None:
        """Wait until the engine may be asked. Raises `NotAdmitted`, and leaves it in the context for the edge."""
        try:
            if context.ticket is not None:
                await context.ticket.turn()
            if self.index.closed(context.session):
                raise SessionClosed(f"Session {context.session} is closed")
        except NotAdmitted as error:
            context.refusal = error
            raise

    async def admit(self, context: CallContext, prompt_tokens: int, requested: int | None) -> tuple[int, Cap]:
        """Largest number of tokens that the call may sample, and what set it. `open` must follow without a break: an open call holds what
        it may still sample, so a session's limit of tokens holds to the token. A call that cannot have all it may ask for waits for another
        of the session to end.

        Raises `PromptTooLong` and `NotAdmitted`; if it is `limits.context_tokens` that the prompt does not fit, the session has reached its
        limit.
        """
        while True:
            if limit := self.index.exhausted(context.session):
                await self._reach(context, limit)
                context.refusal = LimitReached(f"the session's limit of {limit} is reached")
                raise context.refusal
            window = self.index.window(self.engine_window)
            if prompt_tokens >= window:
                if window < self.engine_window:
                    await self._reach(context, "context")
                context.refusal = PromptTooLong(prompt_tokens, window)
                raise context.refusal
            bounds: list[tuple[int, Cap]] = [(window - prompt_tokens, "context" if window < self.engine_window else "window")]
            remaining = self.index.remaining_tokens(context.session)
            if remaining is not None:
                bounds.append((remaining, "tokens"))
            if self.proxy.max_call_tokens is not None:
                bounds.append((self.proxy.max_call_tokens, "call"))
            if requested is not None:
                bounds.append((requested, "request"))
            most = min(bounds, key=lambda bound: bound[0])
            others = [] if remaining is None else self.calls_of(context.session)
            if remaining is None or most[0] <= remaining - sum(call.max_tokens - len(call.ids) for call in others):
                return most
            await self._one_of(others, context)

    async def _one_of(self, calls: list[LiveCall], context: CallContext) -> None:
        """Wait for the first of `calls` to end; meanwhile others may use the engine."""
        if context.ticket is not None:
            context.ticket.stand_back()
        ends = [asyncio.ensure_future(call.done.wait()) for call in calls]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        await self.turn(context)

    def find(self, context: CallContext, prompt: Sequence[int], media: Sequence[str] = ()) -> Placement:
        """Where a prompt (as rendered) belongs in its session; the engine is to be given `Placement.prompt`. `media`: digests of the images
        and the like in it."""
        asked = Asked(context.history, context.kind, context.conversation_hint, tuple(media), context.issued)
        return self.index.find(context.session, prompt, asked)

    async def open(
        self,
        context: CallContext,
        prompt: Sequence[int] | Placement,
        *,
        max_tokens: int,
        cap: Cap,
        sampling: Mapping[str, Any],
        masked_by_grammar: bool,
    ) -> LiveCall:
        """Give the call its id and enter it in its place, and have its open event written, which `follow` waits for. `sampling`: the
        parameters really used."""
        place = prompt if isinstance(prompt, Placement) else self.find(context, prompt)
        call = LiveCall(uuid.uuid4().hex, context, len(place.prompt), max_tokens, cap)
        self.index.enter(context.session, call.id, place)
        context.calls.append(call.id)
        context.prompt_tokens, context.kind = len(place.prompt), place.verdict.kind
        context.finish_reason = None
        self.live[call.id] = call
        corrections = [{"event": "kind", "call": name, "kind": kind, "t": time.time()} for name, kind in place.verdict.corrections]
        call.opened = self.log.hold(
            {
                "event": "open",
                "call": call.id,
                "session": context.session,
                "purpose": context.purpose,
                "replica": self.index.replica,
                "t": time.time(),
                "dialect": context.dialect,
                "path": context.path,
                "streamed": context.streamed,
                "kind": context.kind,
                "conversation": place.conversation,
                "request_sha256": context.request_sha256,
                "parent": place.parent,
                "shared": place.shared,
                "new": [int(token) for token in place.prompt[place.shared :]],
                "sampling": dict(sampling),
                "masked_by_grammar": masked_by_grammar,
                "max_tokens": max_tokens,
                "version": self.version,
                "splice": place.splice,
                "reason": place.reason,
                "rerendered": place.found.rerendered,
                **({"overlap": place.found.overlap} if place.found.overlap else {}),
                **({"media": list(place.asked.media)} if place.asked.media else {}),
                "spawned_by": place.verdict.spawned_by,
                "ignored": context.ignored,
                "model": context.model,
            }
        )
        for correction in corrections:
            self.log.hold(correction).add_done_callback(_look)
        if call.opened.done():
            await self._on_disk(call)
        return call

    async def _on_disk(self, call: LiveCall) -> None:
        """Wait until the open event is on disk. Raises `CallLogError`, and then there is no such call."""
        if call.opened is None:
            return
        if not call.opened.done():
            self.log.flush()
            await asyncio.wait([call.opened])
        if (error := call.opened.exception()) is None:
            call.opened = None
            return
        if not call.ended:
            self._forget(call, "failed", time.time(), None)
            self.index.drop(call.context.session, call.id)
            self._unrecorded(call, error)
        raise error

    def _unrecorded(self, call: LiveCall, error: BaseException) -> None:
        """Nothing of the call is in the log that a later event could belong to."""
        call.context.calls.remove(call.id)
        call.context.unrecorded = isinstance(error, CallLogError)
        call.done.set()

    async def follow(self, call: LiveCall, outputs: AsyncIterator[O], *, delta: bool) -> AsyncGenerator[O, None]:
        """Hand on the engine's outputs and record them. `delta`: each output carries only its new tokens, not all so far."""
        try:
            async for output in outputs:
                completion = output.outputs[0]
                self._take(call, completion, delta)
                if output.finished:
                    await self._finish(call, completion)
                elif call.opened is not None:
                    await self._on_disk(call)
                call.context.begun = True
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            await self._shielded(self._end(call, "cancelled"))
            raise
        except self.refusals as error:
            # The request's own fault, answered with a 400: no failure of the engine.
            await self._shielded(self._end(call, "cancelled", error=f"request refused: {_line(error)}"))
            raise
        except BaseException as error:
            call.context.failed = _line(error)
            await self._shielded(self._end(call, "failed", error=_line(error)))
            raise
        finally:
            if not call.ended:  # the engine's stream stopped without a last output
                call.context.failed = "the engine's stream ended without a last output"
                await self._shielded(self._end(call, "failed", error=call.context.failed))

    def give_up(self) -> None:
        """A weight update is about to end the calls that run: their requests fail, so that the harness asks again."""
        for call in self.live.values():
            call.given_up = True

    def calls_of(self, session: str) -> list[LiveCall]:
        return [call for call in self.live.values() if call.context.session == session]

    def _take(self, call: LiveCall, completion: Completion, delta: bool) -> None:
        seen = 0 if delta else len(call.ids)
        fresh = [int(token) for token in completion.token_ids[seen:]]
        entries = [] if completion.logprobs is None else list(completion.logprobs[seen:])
        if len(entries) != len(fresh):
            raise UnrecordableOutput(f"the engine gave {len(fresh)} tokens and {len(entries)} logprobs")
        for token, entry in zip(fresh, entries, strict=True):
            if token not in entry:
                raise UnrecordableOutput(f"the engine gave no logprob of the sampled token {token}")
            call.logprobs.append(float(entry[token].logprob))
        call.ids += fresh
        call.context.sampled_tokens += len(fresh)
        self.sampled_tokens += len(fresh)
        self.index.sampled(call.context.session, len(fresh))

    async def _finish(self, call: LiveCall, completion: Completion) -> None:
        reason = completion.finish_reason
        context = call.context
        context.finish_reason = reason
        if reason == "abort":
            await self._end(call, "cancelled", reason=reason)
            if call.given_up:
                raise EndedByUpdate("a weight update ended the call")
            return
        if reason == "error":
            context.failed = "the engine ended the call with an error"
            await self._end(call, "failed", reason=reason, error=context.failed)
            return
        spans = [[span.version, span.start, span.end] for span in completion.weight_versions or ()]
        await self._end(call, "length" if reason == "length" else "finished", spans=spans, reason=reason, stop=completion.stop_reason)
        if reason == "length" and (call.cap == "tokens" or call.cap == "context"):
            await self._reach(context, call.cap)

    async def _reach(self, context: CallContext, limit: Limit) -> None:
        context.limit = limit
        if self.index.reach(context.session, limit):
            await self.log.append(session_event(context.session, "limit", limit, time.time()))

    async def _end(
        self,
        call: LiveCall,
        status: str,
        *,
        spans: list[list[Any]] | None = None,
        reason: str | None = None,
        stop: int | str | None = None,
        error: str | None = None,
    ) -> None:
        if call.ended:
            return
        at = time.time()
        self._forget(call, status, at, stop)
        event = {
            "event": status,
            "call": call.id,
            "t": at,
            "ids": call.ids,
            "logprobs": call.logprobs,
            "spans": spans,
            "finish_reason": reason,
            "stop_reason": stop,
            "version": self.version,
            "error": error,
        }
        try:
            await self.log.put(event, after=call.opened)
        except BaseException as cause:
            # Not in the log: no later prompt may name it as its parent.
            self.index.lost(call.context.session, call.id, status)
            call.context.unrecorded = isinstance(cause, CallLogError)
            if call.opened is not None and call.opened.done() and call.opened.exception() is not None:
                self._unrecorded(call, cause)
            raise
        finally:
            call.done.set()

    def _forget(self, call: LiveCall, status: str, at: float, stop: int | str | None) -> None:
        call.ended = True
        self.live.pop(call.id, None)
        self.calls += 1
        self.index.end(call.context.session, call.id, call.ids, status, call.context.kind, at, stop)

    async def _shielded(self, end: Any) -> None:
        task = asyncio.ensure_future(end)
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        await asyncio.shield(task)


def _line(error: BaseException) -> str:
    """One line for the log: class, text, and the cause that an engine hides behind a general error."""
    cause = error.__cause__
    text = f"{type(error).__name__}: {error}" + (f" (from {type(cause).__name__}: {cause})" if cause is not None else "")
    return " ".join(text.split())[:500]


def _look(event: asyncio.Future[None]) -> None:
    """An event that no call depends on: whether it could be written is told by those that some do."""
    if not event.cancelled():
        event.exception()
