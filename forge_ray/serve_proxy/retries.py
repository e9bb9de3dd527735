"""Requests with an identical body in one session: the later one supersedes the earlier.

Clients resend a body unchanged when they believe a reply was lost, and there is no id to tell such a retry by. Only requests of
this replica are known here; the reader of the call log joins those that reached different replicas.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from forge_ray.serve_proxy.identity import CallContext


class Retries:
    """Every request of every open session, by the digest of its body."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[str, list[CallContext]]] = defaultdict(lambda: defaultdict(list))
        self._superseded: dict[str, set[str]] = defaultdict(set)

    def arrived(self, context: CallContext) -> None:
        """Note a request, in the order of arrival."""
        self._requests[context.session][context.request_sha256].append(context)

    def superseded(self, context: CallContext) -> list[tuple[str, str]]:
        """`(call, by)` pairs that became true now that `context`'s request is over; each pair is told once.

        A request that never reached the engine supersedes nothing.
        """
        same = self._requests.get(context.session, {}).get(context.request_sha256, [])
        told, pairs = self._superseded[context.session], []
        for earlier, later in pairwise(request for request in same if request.calls):
            for call in earlier.calls:
                if call not in told:
                    told.add(call)
                    pairs.append((call, later.calls[-1]))
        return pairs

    def forget(self, session: str) -> None:
        """Drop what is known of a closed session."""
        self._requests.pop(session, None)
        self._superseded.pop(session, None)
