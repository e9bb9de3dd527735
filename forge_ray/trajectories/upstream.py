"""A call of a harness that another model answered: text both ways, no token of the policy's. Never trained as a call.

Its event in the call log (`forge_ray.trajectories.call`) does not repeat the history: a request is written as its difference to an
earlier one of the session, `parent`. Fields of the request's top level that are equal there are left out, those that it lacks are named
in `dropped`; of the list of messages (`messages`, or `input` of the responses dialect) only the items after the first `shared` ones are
written. `Requests` makes such differences and remembers digests for it, no text; `restore` puts requests together again.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REMEMBERED = 8
"""Requests of a session that the next one is compared with: about as many conversations as may take turns in it."""
ITEMS = ("messages", "input")


@dataclass(frozen=True)
class UpstreamCall:
    """One call put together from its events."""

    id: str
    session: str
    purpose: str
    replica: str
    upstream: str
    """Key in `proxy.upstreams` that the asked name matched."""
    model: str
    """Model name that the harness asked for."""
    dialect: str
    path: str
    streamed: bool
    kind: str
    conversation: str | None
    """Conversation id that the harness gave, if it gave one."""
    opened: float
    """Unix seconds: the request came."""
    ended: float
    """Unix seconds: the upstream's reply was over."""
    request: dict[str, Any]
    """The body as the harness sent it."""
    status: str
    """finished | length | failed (no reply, an error, or a cut one) | cancelled (the harness left, or the session was closed)."""
    http_status: int
    """What the upstream answered; 502 or 504: it did not."""
    error: str | None = None
    reply: dict[str, Any] = field(default_factory=dict)
    """`text`, `reasoning`, `tool_calls` (`[{"id", "name", "arguments"}]`, arguments as the text that came) and `finish_reason`, as far as
    the reply came."""
    others: tuple[dict[str, Any], ...] = ()
    """Further choices, where several were asked for."""
    usage: dict[str, Any] | None = None
    logprobs: dict[str, Any] | None = None
    """Of the reply's tokens, as the upstream cut them: `tokens` (texts), `logprobs` (nats), `top` (per token `{text: logprob}`; only where
    given) and `bytes` (`{place: [byte …]}` of tokens that are no whole characters)."""
    request_sha256: str = ""
    response_sha256: str = ""
    delivered: bool | None = None
    """None: it was not written (the replica died in between)."""

    @property
    def whole(self) -> bool:
        """The reply came to its own end and reached the harness."""
        return self.status == "finished" and self.delivered is True

    @property
    def reply_class(self) -> str | None:
        """answer | tool_calls | length, as of a call of the policy; None where there is no whole reply."""
        if self.status == "length":
            return "length"
        return None if self.status != "finished" else "tool_calls" if self.reply.get("tool_calls") else "answer"


def upstream_call(replica: str, event: Mapping[str, Any], request: dict[str, Any], delivery: Mapping[str, Any] | None) -> UpstreamCall:
    """The call of an `upstream` event whose request was restored. Raises `KeyError` for an event that lacks a field."""
    return UpstreamCall(
        id=event["call"],
        session=event["session"],
        purpose=event["purpose"],
        replica=replica,
        upstream=event["upstream"],
        model=event["model"],
        dialect=event["dialect"],
        path=event["path"],
        streamed=bool(event["streamed"]),
        kind=event["kind"],
        conversation=event.get("conversation"),
        opened=float(event["opened"]),
        ended=float(event["t"]),
        request=request,
        status=event["status"],
        http_status=int(event["http_status"]),
        error=event.get("error"),
        reply=event.get("reply") or {},
        others=tuple(event.get("others") or ()),
        usage=event.get("usage"),
        logprobs=event.get("logprobs"),
        request_sha256=event.get("request_sha256", ""),
        response_sha256=(delivery or {}).get("response_sha256", ""),
        delivered=None if delivery is None else delivery["event"] == "delivered",
    )


@dataclass
class _Known:
    call: str
    fields: dict[str, bytes]
    items: list[bytes]


class Requests:
    """What a replica remembers of one session's requests to write the next one as a difference."""

    def __init__(self) -> None:
        self._known: deque[_Known] = deque(maxlen=REMEMBERED)
        self._made: dict[str, _Known] = {}

    def encode(self, call: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The fields `parent`, `shared`, `dropped` and `request` of `call`'s event. Changes nothing: see `remember`."""
        name = _items(request)
        items = [_digest(item) for item in request[name]] if name else []
        fields = {key: _digest(value) for key, value in request.items() if key != name}
        self._made[call] = _Known(call, fields, items)
        best, most = None, 0
        for known in self._known:
            shared = next(
                (at for at, (a, b) in enumerate(zip(known.items, items, strict=False)) if a != b), min(len(known.items), len(items))
            )
            if shared >= max(most, 1):
                best, most = known, shared
        if best is None or name is None:
            return {"parent": None, "shared": 0, "dropped": [], "request": dict(request)}
        left = {key: value for key, value in request.items() if key != name and best.fields.get(key) != fields[key]}
        return {
            "parent": best.call,
            "shared": most,
            "dropped": sorted(best.fields.keys() - fields.keys()),
            "request": {**left, name: request[name][most:]},
        }

    def remember(self, call: str, *, written: bool = True) -> None:
        """The event of `call` is on disk, and later ones may refer to it; or (`written` false) it is not."""
        known = self._made.pop(call)
        if written:
            self._known.append(known)


def restore(events: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The whole request of each event (by call id), and the calls whose request cannot be put together."""
    found: dict[str, dict[str, Any]] = {}
    broken: list[str] = []
    for call in events:
        chain, at = [], call
        while at not in found and at in events and len(chain) <= len(events):
            chain.append(at)
            parent = events[at].get("parent")
            if parent is None:
                break
            at = parent
        for one in reversed(chain):
            event = events[one]
            request, parent = event.get("request"), event.get("parent")
            if not isinstance(request, dict):
                break
            if parent is None:
                found[one] = request
                continue
            if (whole := _onto(found.get(parent), event, request)) is None:
                break
            found[one] = whole
        if call not in found:
            broken.append(call)
    return found, broken


def _onto(before: dict[str, Any] | None, event: Mapping[str, Any], request: dict[str, Any]) -> dict[str, Any] | None:
    name, shared = _items(request), event.get("shared", 0)
    if before is None or name is None or not isinstance(before.get(name), list) or len(before[name]) < shared:
        return None
    dropped = event.get("dropped") or ()
    kept = {key: value for key, value in before.items() if key not in dropped}
    return {**kept, **request, name: before[name][:shared] + request[name]}


def _items(request: Mapping[str, Any]) -> str | None:
    return next((name for name in ITEMS if isinstance(request.get(name), list)), None)


def _digest(value: Any) -> bytes:
    # The order of keys inside a value counts: it comes back as it was written.
    return hashlib.blake2b(json.dumps(value, separators=(",", ":")).encode(), digest_size=16).digest()
