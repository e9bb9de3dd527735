"""What the log says about one session, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_ray.trajectories.upstream import UpstreamCall


@dataclass
class SessionState:
    """What the log says about one session. Counters leave no call out, superseded ones included."""

    session: str
    purpose: str | None = None
    closed: bool = False
    limit: str | None = None
    """calls | tokens | context, where a limit ended the session."""
    open: int = 0
    """Calls without an end event: running, or their replica died."""
    calls: int = 0
    """Calls that ended finished or length."""
    failed: int = 0
    cancelled: int = 0
    undelivered: int = 0
    sampled_tokens: int = 0
    """Of every call with an end event."""
    refused: int = 0
    """Requests that were answered with an error and never became a call."""
    refused_by: dict[str, int] = field(default_factory=dict)
    """The same, by the replica that refused."""
    refused_for: dict[str, int] = field(default_factory=dict)
    """The same, by the `reason` of the event."""
    upstream: list[UpstreamCall] = field(default_factory=list)
    """Calls that another model answered, by the time of their end."""
    overflow: bool = False
    """The session's last event of weight is a refusal because the prompt did not fit: no call has ended since."""
    last_status: str | None = None
    last_reply: str | None = None
    """Status and `reply` of the call of the outermost agent that ended last (of any call, where no kind is `agent`)."""
