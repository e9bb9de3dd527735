"""Where a prompt belongs in its session, and what the engine is given for it: splice, conversation and reason put together.

`place` looks and changes nothing; `enter` takes the call in. Both are called from one event loop without a break in between, so parallel
requests of a session see one another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_ray.serve_proxy import fork_reasons
from forge_ray.serve_proxy.conversations import Conversations, Verdict
from forge_ray.serve_proxy.history import History
from forge_ray.serve_proxy.identity import Kind
from forge_ray.serve_proxy.prompt_tree import Match, PromptTree, Recorded, common_prefix
from forge_ray.serve_proxy.splice import REACH, Continuation, Request, Status, continuation, parsed
from forge_ray.serve_proxy.turns import Turn, TurnReader

_NO_RIVAL = ("failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says besides its prompt."""

    history: History | None = None
    kind: Kind = "agent"
    hint: str | None = None
    """Conversation that a header names."""
    media: tuple[str, ...] = ()
    issued: list[str] = field(default_factory=list)
    """Where the ids that the reply gives out will be noted."""

    @property
    def request(self) -> Request:
        if self.history is None:
            return Request(media=self.media)
        return Request(self.history.returned, self.media, self.history.schemas, self.history.tools)


@dataclass(slots=True)
class Placement:
    """The place of one prompt."""

    rendered: np.ndarray
    prompt: Sequence[int]
    """What the engine is given."""
    found: Continuation
    verdict: Verdict
    asked: Asked
    splice: Status
    reason: str | None
    base: Recorded | None
    shared: int
    """Leading tokens of the prompt as used that are the base's prompt as used and its sampled ids."""
    conversation: str = ""
    """Set by `enter`."""

    @property
    def parent(self) -> str | None:
        return self.base.call if self.base is not None else None

    @property
    def stale(self) -> bool:
        """The base has been taken out meanwhile."""
        return self.base is not None and self.base.status == "dropped"


def place(
    tree: PromptTree, conversations: Conversations, prompt: Sequence[int] | np.ndarray, asked: Asked, reader: TurnReader | None
) -> Placement:
    """Find the place of `prompt` (as rendered). O(len(prompt)) where it goes on from a recorded call."""
    rendered = _int32(prompt)
    found = continuation(tree, rendered, asked.request, reader)
    before = found.parent if found.continues else None
    verdict = conversations.judge(
        asked.history, asked.kind, asked.hint, continues=before, rooted=_rooted(found.match), read=lambda call: _read(call, asked, reader)
    )
    splice, reason = _status(tree, conversations, rendered, found, verdict, asked, reader)
    base, shared, plain = found.parent, 0, True
    if base is not None:
        plain = base.plain and found.continues != "spliced"
        shared = base.used + (len(base.ids) if found.continues else common_prefix(base.ids, rendered[found.rest :]))
    else:
        base = found.match.newest() if found.match.matched else None
        if base is not None:
            shared = common_prefix(base.sequence(), rendered)
            # A prompt that holds all of the base's goes on from it as rendered (`restore` relies on that); this one does not.
            shared = shared if base.plain else min(shared, base.used - 1)
            base = base if shared else None
    used: Sequence[int] = prompt if isinstance(prompt, list) else rendered.tolist()
    if not plain and found.parent is not None:
        kept = found.parent.sequence(found.parent.used + (len(found.parent.ids) if found.continues else 0))
        used = np.concatenate([kept, rendered[found.rest :]]).tolist()
    return Placement(rendered, used, found, verdict, asked, splice, reason, base, shared)


def enter(tree: PromptTree, conversations: Conversations, placed: Placement, call: str) -> Recorded:
    """Take the call in as running."""
    found, asked = placed.found, placed.asked
    placed.conversation = placed.verdict.conversation or call
    recorded = Recorded(
        call,
        placed.conversation,
        placed.verdict.kind,
        len(tree.calls) + tree.gone,
        len(placed.rendered),
        placed.base,
        placed.shared,
        np.array(placed.prompt[placed.shared :], dtype=np.int32),
        asked.media,
        issued=asked.issued,
        splice=placed.splice,
        reason=placed.reason,
        plain=placed.found.parent is None or (placed.found.parent.plain and found.continues != "spliced"),
    )
    if asked.history is not None:
        recorded.prints, recorded.head = asked.history.prints, asked.history.head
    if found.continues and found.parent is not None:
        recorded.continues = found.parent
        found.parent.followers.append(recorded)
    tree.add(placed.rendered, recorded)
    conversations.enter(placed.verdict, asked.history, recorded)
    return recorded


def _status(
    tree: PromptTree,
    conversations: Conversations,
    prompt: np.ndarray,
    found: Continuation,
    verdict: Verdict,
    asked: Asked,
    reader: TurnReader | None,
) -> tuple[Status, str | None]:
    history = asked.history
    misses = sorted((miss for miss in found.misses if len(miss.call.ids)), key=lambda miss: miss.call.conversation != verdict.conversation)
    known = conversations.known.get(verdict.conversation or "")
    end = found.match.path[-1]
    twin = end.calls[-1] if end.depth == len(prompt) and end.calls else None
    if found.continues and found.parent is not None:
        if misses:
            return "fork", fork_reasons.of_miss(misses[0], history)
        first = twin is not None and twin.splice != "fork"
        rival = None if first else _rival(found.parent, found.match, verdict)
        if rival is not None:
            return "fork", fork_reasons.of_change(tree, prompt, history, rival, reader)
        if found.continues == "exact":
            return "exact", None
        return "spliced", fork_reasons.of_splice(found.parent, found.rerendered or [], reader)
    if twin is not None:
        return twin.splice, twin.reason
    if known is None:
        near = verdict.near.last if verdict.near is not None else None
        return "new", None if near is None else fork_reasons.of_change(tree, prompt, history, near, reader)
    if misses:
        return "fork", fork_reasons.of_miss(misses[0], history)
    last = known.last
    if last is None:
        return "new", None
    if last.kind == "compaction" and verdict.kind != "compaction":
        return "fork", "the harness compacted its history"
    return "fork", fork_reasons.of_change(tree, prompt, history, last, reader)


def _rival(parent: Recorded, match: Match, verdict: Verdict) -> Recorded | None:
    """Another call that goes on from the same reply with another prompt, and whose own reply this prompt does not have."""
    for call in reversed(parent.followers):
        counts = call.status not in _NO_RIVAL and call.delivered is not False and call.kind in ("agent", "subagent")
        if counts and call.conversation == verdict.conversation and call.home not in match.path:
            return call
    return None


def _rooted(match: Match) -> Recorded | None:
    """The call whose rendered prompt this one begins with, but for the generation prompt."""
    for _, calls in match.beyond(REACH):
        return calls[-1]
    return next((calls[-1] for calls in match.prefixes()), None)


def _read(call: Recorded, asked: Asked, reader: TurnReader | None) -> Turn | None:
    if call.turn is not None:
        return call.turn[1]
    return parsed(call, asked.request, reader) if reader is not None else None


def _int32(prompt: Sequence[int] | np.ndarray) -> np.ndarray:
    return prompt.astype(np.int32) if isinstance(prompt, np.ndarray) else np.frombuffer(array("i", prompt), dtype=np.int32)
