"""Answers that are errors: whoever raised them, they leave in the dialect's own shape and words.

A refusal that belongs to a session is also an event of the log: a prompt that did not fit and a limit that was reached decide how
the rollout ended, also after the replica that refused is gone.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from forge_ray.serve_proxy.dialects import Dialect, Overflow, Refusal, read_overflow
from forge_ray.serve_proxy.dialects.base import parse_object
from forge_ray.serve_proxy.identity import CallContext, Limit
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
        headers = {"x-request-id": caller.request_id, "request-id": caller.request_id}
        if refusal.status in (429, 503):
            headers["retry-after"] = "1"  # without it some clients give up at once
        body = caller.dialect.error(refusal, caller.request_id)
        await JSONResponse(body, status_code=refusal.status, headers=headers)(scope, receive, send)

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

    def engine_failure(self, caller: Caller, status: int = 500) -> Refusal:
        """A fault of ours or of the engine; its details are in the replica's log under the request id."""
        return Refusal(status, f"Internal server error (request {caller.request_id})", code="server_error")

    def translate(self, caller: Caller, context: CallContext | None, status: int, content: bytes) -> tuple[Refusal, str | None]:
        """An error response of the app as a refusal, and the reason to note (None: the engine failed, which the call's own end tells)."""
        error = (parse_object(content) or {}).get("error")
        error = error if isinstance(error, dict) else {}
        message = str(error.get("message") or content[:2000].decode(errors="replace") or "Bad request")
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
