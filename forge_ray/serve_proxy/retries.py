"""Requests with an identical path and body in one session: the later one supersedes the earlier.

Clients resend a body unchanged when they believe a reply was lost, and there is no id to tell such a retry by. The path belongs to it: in
Gemini's dialect it names the model, so one body there can be two different requests. This is what one replica sees at once; the reader of
the call log, which sees them all and what was sent afterwards, has the last word. What is held of a request is the list of its calls, and
of each session the newest bodies only, so that a session that is never closed does not grow for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

from forge_ray.serve_proxy.identity import CallContext

BODIES = 1000
"""Different bodies of a session that are remembered."""


@dataclass(eq=False, slots=True)
class _Request:
    calls: list[str]
    """The context's own list, which the engine tap fills in."""
    over: bool = False
    told: int = 0
    """Of its calls it was told that they are superseded."""


class Retries:
    """The newest requests of every open session, by their path and the digest of their body."""

    def __init__(self) -> None:
        self._requests: dict[str, OrderedDict[tuple[str, str], list[_Request]]] = {}

    def arrived(self, context: CallContext) -> None:
        """Note a request, in the order of arrival."""
        bodies, key = self._requests.setdefault(context.session, OrderedDict()), (context.path, context.request_sha256)
        bodies.setdefault(key, []).append(_Request(context.calls))
        bodies.move_to_end(key)
        if len(bodies) > BODIES:
            bodies.popitem(last=False)

    def superseded(self, context: CallContext) -> list[tuple[str, str]]:
        """`(call, by)` pairs that became true now that `context`'s request is over; each pair is told once.

        A request that never reached the engine supersedes nothing.
        """
        bodies, key = self._requests.get(context.session, OrderedDict()), (context.path, context.request_sha256)
        same, pairs = bodies.get(key, []), []
        for request in same:
            request.over = request.over or request.calls is context.calls
        for earlier, later in pairwise(request for request in same if request.calls):
            pairs += [(call, later.calls[-1]) for call in earlier.calls[earlier.told :]]
            earlier.told = len(earlier.calls)
        if same:
            newest = next((request for request in reversed(same) if request.calls), None)
            bodies[key] = [request for request in same if request is newest or not request.over]
        return pairs

    def forget(self, session: str) -> None:
        """Drop what is known of a closed session."""
        self._requests.pop(session, None)
