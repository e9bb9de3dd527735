"""Requests with an identical body in one session: the later one supersedes the earlier.

Clients resend a body unchanged when they believe a reply was lost, and there is no id to tell such a retry by. Only requests of
this replica are known here; the reader of the call log joins those that reached different replicas. What is held of a request is the
list of its calls, and of each session the newest bodies only, so that a session that is never closed does not grow for ever.
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
    """The newest requests of every open session, by the digest of their body."""

    def __init__(self) -> None:
        self._requests: dict[str, OrderedDict[str, list[_Request]]] = {}

    def arrived(self, context: CallContext) -> None:
        """Note a request, in the order of arrival."""
        bodies = self._requests.setdefault(context.session, OrderedDict())
        bodies.setdefault(context.request_sha256, []).append(_Request(context.calls))
        bodies.move_to_end(context.request_sha256)
        if len(bodies) > BODIES:
            bodies.popitem(last=False)

    def superseded(self, context: CallContext) -> list[tuple[str, str]]:
        """`(call, by)` pairs that became true now that `context`'s request is over; each pair is told once.

        A request that never reached the engine supersedes nothing.
        """
        bodies = self._requests.get(context.session, OrderedDict())
        same, pairs = bodies.get(context.request_sha256, []), []
        for request in same:
            request.over = request.over or request.calls is context.calls
        for earlier, later in pairwise(request for request in same if request.calls):
            pairs += [(call, later.calls[-1]) for call in earlier.calls[earlier.told :]]
            earlier.told = len(earlier.calls)
        if same:
            newest = next((request for request in reversed(same) if request.calls), None)
            bodies[context.request_sha256] = [request for request in same if request is newest or not request.over]
        return pairs

    def forget(self, session: str) -> None:
        """Drop what is known of a closed session."""
        self._requests.pop(session, None)
