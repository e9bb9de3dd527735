"""Who is calling: the context that joins the two taps of the recording proxy.

The edge sets `current` before it calls vLLM's app; the app runs the engine call in the same task or in one started from it, so the
engine tap finds the same object. The object is shared and mutable: the edge fills in what the request says, the engine tap what
became of it, and the edge reads that when the response is over. A request with no context never reaches the engine.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from forge_ray.rollout import Purpose
from forge_ray.serve_proxy.admission import NotAdmitted, Ticket

if TYPE_CHECKING:
    from forge_ray.serve_proxy.history import History

Dialect = Literal["chat", "completions", "responses", "messages", "gemini"]
Kind = Literal["agent", "subagent", "compaction", "aux"]
Limit = Literal["calls", "tokens", "context"]


@dataclass
class CallContext:
    """One model request of a session. Fields above the line are the edge's, those below the engine tap's."""

    session: str
    purpose: Purpose
    dialect: Dialect
    path: str
    """Path inside the dialect, such as `/v1/chat/completions`."""
    streamed: bool = False
    request_sha256: str = ""
    kind: Kind = "agent"
    conversation_hint: str | None = None
    """Conversation id that a header of the harness gave; None: found by prefix matching."""
    asked_tokens: int | None = None
    """Output cap in the request as the harness wrote it (before the edge's clamp); None: none."""
    model: str | None = None
    """Model name in the request as the harness wrote it."""
    ignored: list[str] = field(default_factory=list)
    """What in the request has no effect, by name (`Dialect.unheeded`)."""
    history: History | None = None
    """What the request says of the conversation so far; None: a plain prompt, or a body that cannot be read."""
    issued: list[str] = field(default_factory=list)
    """Ids that the reply gave to its tool calls and items so far; filled in while it goes out."""
    ticket: Ticket | None = None
    """The request's place among those that want the engine; None: it need not wait."""

    # ---- filled in by the engine tap ----
    calls: list[str] = field(default_factory=list)
    """Ids of the calls that this request started, oldest first (one, unless vLLM's app calls the engine again for a server-side tool)."""
    finish_reason: str | None = None
    """Of the last call: stop | length | abort | error; None while it runs or when it was cancelled."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    """Over all calls of this request."""
    limit: Limit | None = None
    """A session limit that this request ran into: `tokens` or `context` when the last call was cut by it (finish reason `length`), or when
    the prompt did not fit `limits.context_tokens` (then the engine was not asked and an overflow error was raised)."""
    failed: str | None = None
    """One line: why the engine failed under the last call."""
    refusal: NotAdmitted | None = None
    """Why the engine was not asked, although vLLM's app wanted to."""
    unrecorded: bool = False
    """The call log could not be written: a full disk, a failing one."""
    begun: bool = False
    """The engine has given its first output: what the app sends from now on is the reply."""


current: ContextVar[CallContext | None] = ContextVar("forge_ray_call", default=None)
"""The request being served in this task. Never put it among a driver script's globals: Ray cannot pickle it."""
