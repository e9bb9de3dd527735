"""Answers that are errors: whoever raised them, they leave in the dialect's own shape and words.

A refusal that belongs to a session is also an event of the log: a prompt that did not fit and a limit that was reached decide how
the rollout ended, also after the replica that refused is gone.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from forge_ray.serve_proxy.admission import LimitReached, NotAdmitted
from forge_ray.serve_proxy.dialects import Dialect, Overflow, Refusal, read_overflow
from forge_ray.serve_proxy.dialects.base import parse_object
from forge_ray.serve_proxy.identity import CallContext, Limit
from forge_ray.serve_proxy.recording import PromptTooLong
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.serve_proxy.sessions import Session
from forge_ray.trajectories.call_log import CallLogError, CallLogWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """Where a request goes and whose it is."""

    path: str
    """Inside the session's prefix."""
    dialect: Dialect
    session: Session | None
    """None: no credentials were given."""
    request_id: str


class Refusals:
    """Answers errors and notes them. `window`: tokens that the engine takes in one call."""

    def __init__(self, index: SessionIndex, log: CallLogWriter, window: int) -> None:
        self._index, self._log, self._window = index, log, window

    async def respond(self, caller: Caller, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with `refusal`."""
        refusal = _dated(refusal)
        headers = {"x-request-id": caller.request_id, "request-id": caller.request_id}
        if refusal.retry_after_s is not None:
            headers["retry-after"] = str(refusal.retry_after_s)  # without it some clients give up at once
        body = caller.dialect.error(refusal, caller.request_id)
        await JSONResponse(body, status_code=refusal.status, headers=headers)(scope, receive, send)

    def answers(self, caller: Caller, context: CallContext | None, scope: Scope, receive: Receive, send: Send) -> _Answers:
        """For `exchange.Tee`."""
        return _Answers(self, caller, context, scope, receive, send)

    async def note(self, caller: Caller, reason: str, status: int) -> None:
        """Count and log that a request of an open session became no call."""
        if caller.session is None:
            return
        session = caller.session.session
        self._index.refused(session)
        if reason == "overflow":
            self._index.overflowed(session)
        event = {"event": "refused", "session": session, "reason": reason, "status": status}
        try:
            await self._log.append(event | {"dialect": caller.dialect.name, "path": caller.path, "t": time.time()})
        except CallLogError:
            logger.exception("a refusal (%s) of session %s is not in the call log", reason, session)

    def limit(self, dialect: Dialect, limit: Limit) -> Refusal:
        """What a session is told that has used up a limit: the only end that every harness knows is a full context."""
        limits = self._index.limits
        window = self._index.window(self._window)
        what = {
            "calls": f"the session's limit of {limits.calls} calls is reached",
            "tokens": f"the session's limit of {limits.sampled_tokens} sampled tokens is reached",
            "context": f"the session's limit of {window} context tokens is reached",
        }[limit]
        words = dialect.overflow(Overflow(window))
        return Refusal(words.status, f"{words.message} ({what})", words.param, words.code)

    def not_admitted(self, caller: Caller, error: NotAdmitted) -> Refusal:
        """What is told of a request that was turned away before the engine saw it."""
        return Refusal(error.status, str(error), code=error.code, retry_after_s=error.retry_after_s)

    def engine_failure(self, caller: Caller, status: int = 500) -> Refusal:
        """A fault of ours or of the engine; its details are in the replica's log under the request id."""
        return Refusal(status, f"Internal server error (request {caller.request_id})", code="server_error")

    def translate(self, caller: Caller, context: CallContext | None, status: int, content: bytes) -> tuple[Refusal, str | None]:
        """An error response of the app as a refusal, and the reason to note (None: the engine failed, which the call's own end tells)."""
        error = (parse_object(content) or {}).get("error")
        error = error if isinstance(error, dict) else {}
        message = str(error.get("message") or content[:2000].decode(errors="replace") or "Bad request")
        if context is not None and context.unrecorded:
            logger.error("%s could not be recorded (%s): %s", caller.path, caller.request_id, context.failed or message)
            return Refusal(
                503, f"The proxy cannot record calls: its disk is full or failing (request {caller.request_id})", code="server_error"
            ), None
        turned_away = context.refusal if context is not None and not context.calls else None
        if turned_away is not None and not isinstance(turned_away, (LimitReached, PromptTooLong)):
            return self.not_admitted(caller, turned_away), turned_away.reason
        if isinstance(turned_away, PromptTooLong) and context is not None and context.limit is None:
            return caller.dialect.overflow(Overflow(self._window, turned_away.prompt_tokens)), "overflow"
        if status >= 500 and context is not None and context.limit is None:
            logger.error("%s answered %d (%s): %s", caller.path, status, caller.request_id, message)
            return self.engine_failure(caller, status if status == 503 else 500), None if context.calls else "engine"
        if context is not None and context.limit is not None:
            return self.limit(caller.dialect, context.limit), "limit"
        overflow = read_overflow(message, self._window, context.asked_tokens if context is not None else None)
        if overflow is not None:
            return caller.dialect.overflow(overflow), "overflow"
        param = error.get("param")
        return Refusal(status, message, param if isinstance(param, str) else None), "invalid"


@dataclass(frozen=True)
class _Answers:
    """Errors of one exchange; see `exchange.Answers`."""

    refusals: Refusals
    caller: Caller
    context: CallContext | None
    scope: Scope
    receive: Receive
    send: Send

    async def error(self, status: int, content: bytes) -> int:
        refusal = await self._judge(status, content)
        await self.refusals.respond(self.caller, refusal, self.scope, self.receive, self.send)
        return refusal.status

    async def event(self, status: int) -> bytes:
        return self.caller.dialect.stream_error(_dated(await self._judge(status, b"")), self.caller.request_id)

    async def _judge(self, status: int, content: bytes) -> Refusal:
        refusal, reason = self.refusals.translate(self.caller, self.context, status, content)
        if reason is not None:
            await self.refusals.note(self.caller, reason, refusal.status)
        return refusal


def _dated(refusal: Refusal) -> Refusal:
    """A refusal for now says when to come again, in its text too: some clients read it only there, and each in words of its own."""
    if refusal.status not in (429, 503):
        return refusal
    seconds = refusal.retry_after_s or 1
    words = f"{refusal.message.rstrip('. ')}. Please try again in {seconds}s (retry-after: {seconds})."
    return replace(refusal, message=words, retry_after_s=seconds)
