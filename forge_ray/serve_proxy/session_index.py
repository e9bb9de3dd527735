"""What a replica knows about its sessions: which recorded sequence a new prompt extends, how much was used, which limit was reached.

It lives in the replica's event loop only (no locks) and holds nothing that the call log does not: `rebuild` makes it anew when a replica
(re)starts. Counters are kept per replica that wrote them, so that the views of several replicas can be merged without counting a call
twice (`forge_ray.serve_proxy.client`). Prompts are matched by tokens. A recorded sequence is kept only while no later prompt of the session
contains all of it, so that a linear conversation costs one array and one comparison per call, whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np

from forge_ray.config import Limits
from forge_ray.serve_proxy.identity import Limit
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogReader

SAMPLED = ("finished", "length")
LOG = "log"
"""Key of counters that the log cannot attribute to a replica."""
TAIL = 8
"""Tokens at the end of a conversation's first prompt that may be rendered otherwise once an answer follows (the generation prompt)."""


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
        rank, before = kind == "agent", self.last_kind == "agent"
        if (rank, at) >= (before, self.last_ended):
            self.last_call, self.last_kind, self.last_status, self.last_reply, self.last_ended = call, kind, status, reply, at


@dataclass
class _Sequence:
    call: str
    conversation: str
    tokens: np.ndarray
    """int32, prompt and, once the call has ended, sampled ids."""
    prompt: int
    ended: bool


@dataclass
class SessionState:
    """One session in this replica."""

    session: str
    closed: bool = False
    limit: Limit | None = None
    """The first limit that the session ran into."""
    counts: dict[str, Counts] = field(default_factory=dict)
    """By replica id; this replica's own counters under its own id."""
    sequences: dict[str, _Sequence] = field(default_factory=dict)
    roots: dict[str, np.ndarray] = field(default_factory=dict)
    """First prompt of each conversation."""

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


@dataclass(frozen=True)
class Place:
    """Where a prompt stands among the recorded sequences of its session."""

    parent: str | None
    shared: int
    """Leading tokens that the prompt has in common with the parent's prompt + sampled ids."""
    conversation: str


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-d integer arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n]) if n else np.empty(0, dtype=np.int64)
    return int(different[0]) if len(different) else n


class SessionIndex:
    """All sessions of this replica. The edge asks and reports here, and so does the engine tap."""

    def __init__(self, replica: str, limits: Limits) -> None:
        self.replica, self.limits = replica, limits
        self._sessions: dict[str, SessionState] = {}

    # ---- what the edge asks ----

    def state(self, session: str) -> SessionState:
        """The session's state, made when it is not known yet."""
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = SessionState(session)
        return found

    def sessions(self) -> list[str]:
        return list(self._sessions)

    def closed(self, session: str) -> bool:
        """Whether calls of the session are refused for good."""
        return session in self._sessions and self._sessions[session].closed

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
        """Refuse every later call. True when it was open: then append the log's session event. Frees the sequences."""
        state = self.state(session)
        if state.closed:
            return False
        state.closed = True
        state.sequences.clear()
        state.roots.clear()
        return True

    def refused(self, session: str) -> None:
        """A call was answered with an error before it reached the engine although the harness's request was well formed."""
        self._own(session).refused += 1

    def overflowed(self, session: str) -> None:
        """A prompt did not fit the window. Holds until a later call of the session ends."""
        self._own(session).overflow = True

    def delivered(self, session: str, call: str, reply: str | None) -> None:
        """The whole response of `call` was handed to the client; `reply`: answer | tool_calls | length | None."""
        own = self._own(session)
        if own.last_call == call:
            own.last_reply = reply

    def undelivered(self, session: str) -> None:
        self._own(session).undelivered += 1

    # ---- what the engine tap asks and reports ----

    def place(self, session: str, prompt: Sequence[int] | np.ndarray, call: str, hint: str | None = None) -> Place:
        """Parent and conversation of a prompt; the call is entered as running (`end` completes it).

        A prompt continues its parent's conversation when they share the conversation's whole first prompt (system, tools, first user item);
        otherwise it begins one of its own. A hint from the harness's headers wins.
        """
        state = self.state(session)
        tokens = np.asarray(prompt, dtype=np.int32)
        best, shared = None, 0
        for known in reversed(list(state.sequences.values())):
            if len(known.tokens) <= shared:
                continue
            n = common_prefix(known.tokens, tokens)
            if n > shared:
                best, shared = known, n
        conversation = hint
        if conversation is None and best is not None:
            root = state.roots.get(best.conversation)
            if root is not None and shared >= len(root) - TAIL and common_prefix(root, tokens) >= len(root) - TAIL:
                conversation = best.conversation
        if conversation is None:
            conversation = call
        state.roots.setdefault(conversation, tokens)
        own = self._own(session)
        own.started += 1
        own.live += 1
        if best is not None and best.ended and shared == len(best.tokens):
            del state.sequences[best.call]
        if not state.closed:
            state.sequences[call] = _Sequence(call, conversation, tokens, len(tokens), False)
        return Place(best.call if best else None, shared, conversation)

    def drop(self, session: str, call: str) -> None:
        """The call's events are not in the log: it is nobody's parent."""
        state = self.state(session)
        state.sequences.pop(call, None)
        state.roots.pop(call, None)

    def sampled(self, session: str, count: int) -> None:
        """`count` more tokens were sampled."""
        self._own(session).sampled_tokens += count

    def end(self, session: str, call: str, ids: Sequence[int], status: str, kind: str, at: float) -> None:
        """The call ended with `status` (finished | length | cancelled | failed) at Unix second `at`."""
        state, own = self.state(session), self._own(session)
        own.live -= 1
        own.calls += status in SAMPLED
        own.failed += status == "failed"
        own.overflow = False
        own.ended(call, kind, status, None, at)
        known = state.sequences.get(call)
        if known is not None:
            known.tokens = np.concatenate([known.tokens, np.asarray(ids, dtype=np.int32)])
            known.ended = True

    def _own(self, session: str) -> Counts:
        counts = self.state(session).counts
        if self.replica not in counts:
            counts[self.replica] = Counts()
        return counts[self.replica]

    # ---- after a restart ----

    def restore(
        self, session: str, calls: Sequence[Call], *, closed: bool, limit: str | None, refused: int = 0, overflow: bool = False
    ) -> None:
        """Enter a session as the call log has it. Calls that are still open there count as `live` of the replica that opened them: whoever
        knows which replicas are alive decides whether they are lost. Refusals do not name their replica; they are counted under `LOG`."""
        state = self.state(session)
        state.closed = closed
        state.limit = state.limit or cast(Limit | None, limit)
        if refused or overflow:
            state.counts[LOG] = Counts(refused=refused, overflow=overflow)
        for call in sorted(calls, key=lambda c: c.opened):
            counts = state.counts.setdefault(call.replica, Counts())
            counts.started += 1
            counts.calls += call.status in SAMPLED
            counts.sampled_tokens += len(call.ids)
            counts.live += call.status == "open"
            counts.failed += call.status == "failed"
            counts.undelivered += call.status in SAMPLED and call.delivered is not True
            if call.ended is not None:
                counts.ended(call.id, call.kind, call.status, call.reply, call.ended)
            if closed:
                continue
            tokens = np.asarray(call.prompt_ids + call.ids, dtype=np.int32)
            state.roots.setdefault(call.conversation, tokens[: len(call.prompt_ids)])
            known = _Sequence(call.id, call.conversation, tokens, len(call.prompt_ids), call.status != "open")
            for other in [s for s in state.sequences.values() if len(s.tokens) <= len(tokens)]:
                if common_prefix(other.tokens, tokens[: known.prompt]) == len(other.tokens):
                    del state.sequences[other.call]
            state.sequences[call.id] = known


def session_event(session: str, status: str, limit: Limit | None, at: float) -> dict[str, Any]:
    """The call log's event of a session that was closed or that reached a limit."""
    return {"event": "session", "session": session, "status": status, "limit": limit, "t": at}


def rebuild(index: SessionIndex, reader: CallLogReader) -> int:
    """Fill the index from the log; returns the number of sessions. The reader forgets what was taken over."""
    reader.refresh()
    names = list(reader.sessions())
    for name in names:
        state = reader.state(name)
        index.restore(name, reader.session(name), closed=state.closed, limit=state.limit, refused=state.refused, overflow=state.overflow)
        reader.forget(name)
    return len(names)
