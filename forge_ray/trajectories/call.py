"""A call: one model request of a harness, as the call log's events describe it.

The log is a series of files of JSON lines per replica incarnation. Each line is one event of one call (or of a session), in the order in
which it became true; compaction moves them into Parquet (`call_log.table`), which holds the same events:

    session    {"event": "session", "session", "status": "closed" | "limit", "limit": "calls" | "tokens" | "context" | null, "t"}
    open       {"event": "open", "call", "session", "purpose", "replica", "t", "dialect", "path", "streamed", "kind", "conversation",
                "request_sha256", "parent", "shared", "new", "sampling", "masked_by_grammar", "max_tokens", "version",
                "splice", "reason", "rerendered", "overlap", "media", "spawned_by", "ignored", "model"}
    finished | length | cancelled | failed
               {"event", "call", "t", "ids", "logprobs", "spans", "finish_reason", "stop_reason", "version", "error"}
    delivered | undelivered
               {"event", "call", "t", "response_sha256", "bytes", "status", "usage", "reply", "issued", "first_byte_s", "last_byte_s"}
    kind       {"event": "kind", "call", "kind", "t"}
    refused    {"event": "refused", "session", "reason", "status", "dialect", "path", "t"}
    upstream   {"event": "upstream", "call", "session", "t", "opened", "purpose", "upstream", "model", "dialect", "path", "streamed",
                "kind", "conversation", "request_sha256", "parent", "shared", "dropped", "request", "reply", "others", "usage", "logprobs",
                "status", "http_status", "error"}

`reply` is what the harness was given: "answer" (no tool call), "tool_calls", "length", or null where it cannot be told.

`splice` says how the prompt continues its conversation: `new` (the first call of it), `exact` (as rendered it begins with all of the
call before it, token for token), `spliced` (it does after a re-rendered reply was replaced by the tokens that were sampled), `fork`
(it does not; `reason` says where and why it left). `rerendered` holds the ids that were
replaced, null where nothing was; they also stand for the last `overlap` tokens (absent: 0) of the parent's prompt as rendered, where those
merged with the reply's first. `media` (absent: none) are digests of the images and the like in the prompt, by modality and place
(`image:5f…`): their tokens in it are placeholders, and what they show is not in the log. `spawned_by` is the call whose tool call started
this conversation (a sub-agent's first call), else null.
`ignored` names fields of the request that have no effect here; `model` is the model name that was asked for. `kind` (the event) corrects a
call's kind by what was seen later. `issued` are the ids that the reply gave to its tool calls and items.

`refused` is a request that was answered with an error and never became a call; `reason` is "overflow" (the prompt did not fit the
window), "limit" (a session limit), or what else was wrong with it.

`upstream` is a call that another model answered (`proxy.upstreams`), written when its reply is over and before the last byte is passed on;
see `forge_ray.trajectories.upstream`. It is text and never a `Call`. Its `delivered` or `undelivered` event names the session too.

`parent` is the call whose prompt + sampled ids this prompt shares its first `shared` tokens with (null: none, shared = 0);
`new` holds the rest of the prompt's ids, so the log grows with new tokens only. `version` is the weight version at that moment
(`open`: before the first token; end event: after the last). `spans` is `[[version, first, end], …]` over `ids`, end exclusive; a
cancelled or failed call has `null` there. `logprobs` are natural logs of the sampled ids under the distribution that was sampled
from (processed: after temperature). `sampling` holds the parameters really used. Times `t` are Unix seconds.

A version label is `<incarnation>.<step>`: `step` weight updates of the run's incarnation `incarnation`. It never names two sets of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

END_EVENTS = ("finished", "length", "cancelled", "failed")
WHOLE = ("finished", "length")
"""Those of a call that the engine ended by itself."""


@dataclass
class Call:
    """One call put together from its events; `status` is open | finished | length | cancelled | failed."""

    id: str
    session: str
    purpose: str
    replica: str
    dialect: str
    path: str
    streamed: bool
    kind: str
    """agent | subagent | compaction | aux."""
    conversation: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    masked_by_grammar: bool
    max_tokens: int
    opened: float
    parent: str | None = None
    shared: int = 0
    ids: list[int] = field(default_factory=list)
    """Sampled token ids, the end token included."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] | None = None
    version_open: str = ""
    version_end: str = ""
    status: str = "open"
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    ended: float | None = None
    delivered: bool | None = None
    """None: neither event was written (the replica died in between). True, whatever was written, where a later prompt goes on from it."""
    superseded_by: str | None = None
    """A call of an equal request; None where a later prompt goes on from this one. See `call_log.assemble`."""
    usage: dict[str, Any] | None = None
    reply: str | None = None
    request_sha256: str = ""
    response_sha256: str = ""
    splice: str = "new"
    """new | exact | spliced | fork."""
    reason: str | None = None
    """Why the prompt was spliced or forked, one line."""
    rerendered: list[int] | None = None
    """Ids that the prompt had, as rendered, in the place of the parent's sampled ones."""
    overlap: int = 0
    """Tokens at the end of the parent's prompt, as rendered, that `rerendered` holds in another form: they merged with the reply."""
    media: list[str] = field(default_factory=list)
    """Digests of the images and the like in the prompt, whose tokens there are placeholders."""
    spawned_by: str | None = None
    """The call whose tool call started this conversation."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the request that had no effect."""
    model: str | None = None
    """Model name in the request."""
    issued: list[str] = field(default_factory=list)
    """Ids of tool calls and items in the reply."""
    quarantined: bool = False
    """Something in the log of its session is wrong, see `CallLogReader.problems`."""

    @property
    def temperature(self) -> float:
        return float(self.sampling.get("temperature", 1.0))

    @property
    def trainable(self) -> bool:
        """Whole, delivered, not replaced by a retry, sampled without a grammar and without an image before it (the learner sees tokens, and
        would compute another policy's log-probabilities), with its versions known and its log in order."""
        return (
            self.status in WHOLE
            and self.delivered is True
            and self.superseded_by is None
            and not self.masked_by_grammar
            and not self.media
            and self.spans is not None
            and not self.quarantined
            and len(self.ids) == len(self.logprobs) > 0
        )

    def versions(self) -> list[str]:
        """The weight version of every sampled token, shape (len(ids),); empty without spans."""
        labels: list[str] = []
        for label, first, end in self.spans or ():
            labels[first:end] = [label] * (end - first)
        return labels


class Answered(Protocol):
    """What tells whether a harness lived through a call: of a `Call`, or of a row of the calls dataset."""

    @property
    def status(self) -> str: ...
    @property
    def delivered(self) -> bool | None: ...
    @property
    def superseded_by(self) -> str | None: ...


def lived_through(call: Answered) -> bool:
    """Whether the harness went on with the reply: it is whole, is not known to have been lost on its way, and no retry took its place."""
    return call.status in WHOLE and call.delivered is not False and call.superseded_by is None


def version_step(label: str) -> int:
    """Step number of a version label `<incarnation>.<step>`; `<incarnation>.init`, the weights that a replica started with, is step 0."""
    step = label.rpartition(".")[2]
    return 0 if step == "init" else int(step)
