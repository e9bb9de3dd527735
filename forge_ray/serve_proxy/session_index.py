"""What a replica knows about its sessions: which recorded calls a new prompt goes on from, how much was used, which limit was reached.

It lives in the replica's event loop only (no locks). `restore` makes a session anew from the call log when a replica (re)starts; what the
log does not hold, the digests of histories, comes back with the next requests. Counters are kept per replica that wrote them, so that the
views of several replicas can be merged without counting a call twice (`forge_ray.serve_proxy.client`). Calls are kept until the session
is closed, each by its new tokens only (`prompt_tree`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np

from forge_ray.config import Limits
from forge_ray.serve_proxy import kinds, placing
from forge_ray.serve_proxy.conversations import Conversations
from forge_ray.serve_proxy.identity import Limit
from forge_ray.serve_proxy.placing import Asked, Placement
from forge_ray.serve_proxy.prompt_tree import PromptTree, Recorded
from forge_ray.serve_proxy.turns import TurnReader
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.upstream import UpstreamCall

SAMPLED = ("finished", "length")
HELD = 1000
"""Closed sessions whose state is held, because somebody who missed the answer may close them again."""
LOG = "log"
"""Key of counters that the log cannot attribute to a replica."""


@dataclass
class Counts:
    """What happened to the calls of one session that one replica recorded."""

    started: int = 0
    calls: int = 0
    """Ended by themselves (finished or length)."""
    sampled_tokens: int = 0
    """Cancelled calls included."""
    live: int = 0
    """Neither ended nor known to be lost."""
    failed: int = 0
    undelivered: int = 0
    refused: int = 0
    upstream: int = 0
    """Calls that another model answered. They are in no other number here."""
    overflow: bool = False
    last_call: str | None = None
    """The call of the outermost agent that ended last; of any kind, as long as none of the outermost agent has ended."""
    last_kind: str | None = None
    last_status: str | None = None
    last_reply: str | None = None
    last_ended: float = 0.0
    """Unix seconds of the last call's end."""

    def ended(self, call: str, kind: str, status: str, reply: str | None, at: float) -> None:
        """Note a call's end if it is the last that counts."""
        if (kinds.rank(kind), at) >= (kinds.rank(self.last_kind), self.last_ended):
            self.last_call, self.last_kind, self.last_status, self.last_reply, self.last_ended = call, kind, status, reply, at


@dataclass
class SessionState:
    """One session in this replica."""

    session: str
    closed: bool = False
    limit: Limit | None = None
    """The first limit that the session ran into."""
    counts: dict[str, Counts] = field(default_factory=dict)
    """By replica id; this replica's own counters under its own id."""
    tree: PromptTree = field(default_factory=PromptTree)
    conversations: Conversations = field(default_factory=Conversations)

    def used_tokens(self) -> int:
        return sum(c.sampled_tokens for c in self.counts.values())

    def started_calls(self) -> int:
        return sum(c.started for c in self.counts.values())

    def report(self) -> dict[str, Any]:
        """Plain values for `client.merge`."""
        return {
            "session": self.session,
            "closed": self.closed,
            "limit": self.limit,
            "counts": {replica: asdict(counts) for replica, counts in self.counts.items()},
        }


class SessionIndex:
    """All sessions of this replica. The edge asks and reports here, and so does the engine tap."""

    def __init__(self, replica: str, limits: Limits) -> None:
        self.replica, self.limits = replica, limits
        self.reader: TurnReader | None = None
        """The tokenizer and parsers of the server; None: prompts are compared by tokens only."""
        self._sessions: dict[str, SessionState] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        """Closed sessions whose state is held, the one that was closed last at the end."""
        self._gone: set[str] = set()

    # ---- what the edge asks ----

    def state(self, session: str) -> SessionState:
        """The session's state, made when it is not known yet."""
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = SessionState(session, closed=session in self._gone)
        return found

    def sessions(self) -> list[str]:
        return list(self._sessions)

    def closed(self, session: str) -> bool:
        """Whether calls of the session are refused for good."""
        return session in self._gone or (session in self._sessions and self._sessions[session].closed)

    def gone(self, session: str) -> bool:
        """Whether the session was closed so long ago that only its name is held: what happened in it is in the log alone."""
        return session in self._gone and session not in self._sessions

    def exhausted(self, session: str) -> Limit | None:
        """The limit that forbids one more call, or None. The session is not changed: see `reach`."""
        if session not in self._sessions:
            return None
        state = self._sessions[session]
        if state.limit is not None:
            return state.limit
        if self.limits.calls is not None and state.started_calls() >= self.limits.calls:
            return "calls"
        remaining = self.remaining_tokens(session)
        return "tokens" if remaining is not None and remaining <= 0 else None

    def remaining_tokens(self, session: str) -> int | None:
        """Tokens that the session may still sample; None without such a limit. Calls that run at the same time share it: each may use what
        was left when it began."""
        if self.limits.sampled_tokens is None:
            return None
        return self.limits.sampled_tokens - self.state(session).used_tokens()

    def window(self, engine_window: int) -> int:
        """Prompt + sampled tokens that one call may have: the engine's window or the smaller `limits.context_tokens`."""
        return min(engine_window, self.limits.context_tokens or engine_window)

    # ---- what the edge and the control plane report ----

    def reach(self, session: str, limit: Limit) -> bool:
        """Note the first limit that the session ran into. True when it is new: then append the log's session event."""
        state = self.state(session)
        if state.limit is not None:
            return False
        state.limit = limit
        return True

    def close(self, session: str) -> bool:
        """Refuse every later call. True when it was open: then append the log's session event. Frees its calls."""
        state = self.state(session)
        self._closed[session] = None
        self._closed.move_to_end(session)
        while len(self._closed) > HELD:
            old, _ = self._closed.popitem(last=False)
            self._sessions.pop(old, None)
            self._gone.add(old)
        if state.closed:
            return False
        state.closed = True
        state.tree, state.conversations = PromptTree(), Conversations()
        return True

    def refused(self, session: str) -> None:
        """A call was answered with an error before it reached the engine although the harness's request was well formed."""
        self._own(session).refused += 1

    def upstream(self, session: str, call: str, kind: str, status: str, reply: str | None, at: float) -> None:
        """A call that another model was asked for is over; `kind` is `upstream` where the outermost agent made it."""
        own = self._own(session)
        own.upstream += 1
        own.ended(call, kind, status, reply, at)

    def overflowed(self, session: str) -> None:
        """A prompt did not fit the window. Holds until a later call of the session ends."""
        self._own(session).overflow = True

    def delivered(self, session: str, call: str, reply: str | None) -> None:
        """The whole response of `call` was handed to the client; `reply`: answer | tool_calls | length | None."""
        own = self._own(session)
        if own.last_call == call:
            own.last_reply = reply
        if known := self.state(session).tree.calls.get(call):
            known.delivered = True

    def undelivered(self, session: str, calls: Sequence[str] = ()) -> None:
        """A response did not reach its client whole; `calls` were behind it."""
        self._own(session).undelivered += 1
        for call in calls:
            if known := self.state(session).tree.calls.get(call):
                known.delivered = False

    # ---- what the engine tap asks and reports ----

    def find(self, session: str, prompt: Sequence[int] | np.ndarray, asked: Asked) -> Placement:
        """Where a prompt (as rendered) belongs and what the engine is to be given for it. Changes nothing: see `enter`."""
        state = self.state(session)
        return placing.place(state.tree, state.conversations, prompt, asked, self.reader)

    def enter(self, session: str, call: str, placed: Placement) -> None:
        """The call is open; `end` completes it. Without a break after `find`, or after a look at `Placement.stale`."""
        state, own = self.state(session), self._own(session)
        own.started += 1
        own.live += 1
        if state.closed:
            placed.conversation = placed.verdict.conversation or call
            return
        placing.enter(state.tree, state.conversations, placed, call)
        for counts in state.counts.values():
            for name, kind in placed.verdict.corrections:
                if counts.last_call == name:
                    counts.last_kind = kind

    def place(self, session: str, prompt: Sequence[int] | np.ndarray, call: str, hint: str | None = None) -> Placement:
        """`find` and `enter` of a prompt of which nothing else is known."""
        placed = self.find(session, prompt, Asked(hint=hint))
        self.enter(session, call, placed)
        return placed

    def drop(self, session: str, call: str) -> None:
        """The call's events are not in the log: it is nobody's parent."""
        state = self.state(session)
        known = state.tree.calls.get(call)
        if known is not None:
            state.tree.remove(call)
            state.conversations.forget(known)

    def lost(self, session: str, call: str, status: str) -> None:
        """The end of the call, with `status`, could not be logged: for the log it never ended, and it is nobody's parent."""
        own = self._own(session)
        own.calls -= status in SAMPLED
        own.failed += status != "failed"
        if own.last_call == call:
            own.last_status, own.last_reply = "failed", None
        self.drop(session, call)

    def sampled(self, session: str, count: int) -> None:
        """`count` more tokens were sampled."""
        self._own(session).sampled_tokens += count

    def end(self, session: str, call: str, ids: Sequence[int], status: str, kind: str, at: float, stop: int | str | None = None) -> None:
        """The call ended with `status` (finished | length | cancelled | failed) at Unix second `at`; `stop`: the log's `stop_reason`."""
        state, own = self.state(session), self._own(session)
        own.live -= 1
        own.calls += status in SAMPLED
        own.failed += status == "failed"
        for counts in (own, state.counts.get(LOG)):
            if counts is not None:
                counts.overflow = False
        own.ended(call, kind, status, None, at)
        known = state.tree.calls.get(call)
        if known is not None:
            known.ids, known.status, known.stop = np.array(ids, dtype=np.int32), status, stop

    def _own(self, session: str) -> Counts:
        counts = self.state(session).counts
        if self.replica not in counts:
            counts[self.replica] = Counts()
        return counts[self.replica]

    # ---- after a restart ----

    def restore(
        self,
        session: str,
        calls: Sequence[Call],
        *,
        closed: bool,
        limit: str | None,
        refused: int = 0,
        overflow: bool = False,
        refused_by: Mapping[str, int] | None = None,
        upstream: Sequence[UpstreamCall] = (),
    ) -> None:
        """Enter a session as the call log has it, again when it has more. This replica knows its own calls better than the log.

        Calls that are still open there count as `live` of the replica that opened them: whoever knows which replicas are alive decides
        whether they are lost. Refusals of `refused_by` are counted under their replicas, those of `refused` under `LOG`.
        """
        state = self.state(session)
        state.closed = state.closed or closed
        state.limit = state.limit or cast(Limit | None, limit)
        if refused or overflow:
            state.counts[LOG] = Counts(refused=refused, overflow=overflow)
        own = self.replica in state.counts
        calls = [call for call in calls if call.replica != self.replica or not own]
        upstream = [call for call in upstream if call.replica != self.replica or not own]
        others = {call.replica for call in (*calls, *upstream)} | (refused_by or {}).keys()
        for replica in others - ({self.replica} if own else set()):
            state.counts[replica] = Counts(refused=(refused_by or {}).get(replica, 0))
        for passed in upstream:
            counts = state.counts[passed.replica]
            counts.upstream += 1
            kind, reply = "upstream" if passed.kind == "agent" else passed.kind, passed.reply_class if passed.delivered else None
            counts.ended(passed.id, kind, passed.status, reply, passed.ended)
        for call in sorted(calls, key=lambda c: c.opened):
            counts = state.counts[call.replica]
            counts.started += 1
            counts.calls += call.status in SAMPLED
            counts.sampled_tokens += len(call.ids)
            counts.live += call.status == "open"
            counts.failed += call.status == "failed"
            counts.undelivered += call.status in SAMPLED and call.delivered is not True
            if call.ended is not None:
                counts.ended(call.id, call.kind, call.status, call.reply, call.ended)
            if state.closed:
                continue
            known = state.tree.calls.get(call.id)
            if known is None:
                self._restore(state, call)
            else:
                known.delivered = call.delivered
                if known.status == "open":
                    known.ids, known.status, known.stop = np.array(call.ids, dtype=np.int32), call.status, call.stop_reason
                    known.issued = list(call.issued)

    @staticmethod
    def _restore(state: SessionState, call: Call) -> None:
        """Enter a call of the log; its parent is entered before."""
        used = np.array(call.prompt_ids, dtype=np.int32)
        parent = state.tree.calls.get(call.parent or "")
        rendered = used
        if parent is not None and call.rerendered is not None:
            before = state.tree.rendered(parent)
            rendered = np.concatenate(
                [before[: len(before) - call.overlap], np.array(call.rerendered, dtype=np.int32), used[parent.used + len(parent.ids) :]]
            )
        elif parent is not None and call.shared >= parent.used and not parent.plain:
            rendered = np.concatenate([state.tree.rendered(parent), used[parent.used :]])
        known = Recorded(
            call.id,
            call.conversation,
            call.kind,
            len(state.tree.calls) + state.tree.gone,
            len(rendered),
            parent,
            call.shared if parent is not None else 0,
            used[call.shared if parent is not None else 0 :].copy(),
            tuple(call.media),
            ids=np.array(call.ids, dtype=np.int32),
            status=call.status,
            splice=cast(Any, call.splice),
            reason=call.reason,
            plain=len(rendered) == len(used) and bool((rendered == used).all()),
            stop=call.stop_reason,
            delivered=call.delivered,
            issued=list(call.issued),
        )
        if parent is not None and call.splice in ("exact", "spliced"):
            known.continues = parent
            parent.followers.append(known)
        state.tree.add(rendered, known)
        state.conversations.restored(known)


def session_event(session: str, status: str, limit: Limit | None, at: float) -> dict[str, Any]:
    """The call log's event of a session that was closed or that reached a limit."""
    return {"event": "session", "session": session, "status": status, "limit": limit, "t": at}
