"""What became of the replies: the upper tap's events.

`delivered` means that the client was there when the last byte of a reply that came to its dialect's proper end was handed over; all
else is `undelivered`. Both are written after that byte, so that no client waits for the disk here. A reply whose event cannot be
written counts as undelivered.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from pathlib import Path

from forge_ray.serve_proxy.exchange import Tee
from forge_ray.serve_proxy.identity import CallContext, Limit
from forge_ray.serve_proxy.session_index import SessionIndex, session_event
from forge_ray.trajectories.call_log import CallLogError, CallLogWriter

logger = logging.getLogger(__name__)


class Delivery:
    """Writes what the edge learns of each call. `bodies`: where to keep whole bodies, or None."""

    def __init__(self, index: SessionIndex, log: CallLogWriter, bodies: Path | None) -> None:
        self._index, self._log, self._bodies = index, log, bodies

    async def reach(self, session: str, limit: Limit) -> None:
        """End the session by `limit`, once."""
        if self._index.reach(session, limit):
            try:
                await self._log.append(session_event(session, "limit", limit, time.time()))
            except CallLogError:
                logger.exception("the limit %s of session %s is not in the call log", limit, session)

    async def conclude(self, context: CallContext, tee: Tee, request: bytes) -> None:
        """Write the events of a request that is over, however it ended."""
        reply = tee.reply.reply if tee.reply is not None else None
        report = {
            "t": time.time(),
            "response_sha256": tee.response_sha256,
            "bytes": tee.bytes,
            "status": tee.status,
            "usage": tee.reply.usage if tee.reply is not None else None,
            "issued": list(tee.reply.issued) if tee.reply is not None else [],
            "first_byte_s": tee.first_byte_s,
            "last_byte_s": tee.last_byte_s,
        }
        name = "delivered" if tee.delivered else "undelivered"
        # Of several calls behind one request (tools that the server runs) only the last one's reply was the client's.
        told = {call: "tool_calls" for call in context.calls[:-1]} | {call: reply for call in context.calls[-1:]}
        results = await asyncio.gather(
            *(self._log.hold({"event": name, "call": call, "reply": said, **report}) for call, said in told.items()),
            *([self._keep(request, bytes(tee.kept))] if self._bodies is not None else []),
            return_exceptions=True,
        )
        lost = [result for result in results if isinstance(result, BaseException)]
        if lost:
            logger.error("session %s: %d event(s) of %s are not in the call log: %s", context.session, len(lost), context.calls, lost[0])
        if not context.calls:
            return
        if tee.delivered and not lost:
            self._index.delivered(context.session, context.calls[-1], reply)
        else:
            self._index.undelivered(context.session, context.calls)

    async def _keep(self, *bodies: bytes) -> None:
        """Store bodies under their digests, off the event loop."""
        directory = self._bodies
        assert directory is not None

        def write() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            for body in filter(None, bodies):
                file = directory / hashlib.sha256(body).hexdigest()
                if not file.exists():
                    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
                    try:
                        new.write_bytes(body)
                        new.replace(file)  # at once: there is no half of a body under its digest
                    finally:
                        new.unlink(missing_ok=True)

        try:
            await asyncio.to_thread(write)
        except OSError:
            logger.exception("a body could not be kept in %s", directory)
