"""A plan: one case written out for one program. What is scripted, what goes wrong, and what must be found afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_ray.conformance.door import Fault
from forge_ray.conformance.reply import Reply

CONTINUED = frozenset({"exact", "spliced"})
NEW = frozenset({"new"})


@dataclass(frozen=True)
class Expected:
    """A counted call that the recording must hold."""

    line: str
    """Name of the rule of the script that answered it."""
    kind: str = "agent"
    conversation: str | None = "main"
    """Calls of one name are one conversation, others are others; None: not said."""
    continuation: frozenset[str] | None = CONTINUED
    """One of these; None: not said."""
    spawned_by: str | None = None
    """The line whose tool call began the conversation."""
    reason: str = ""
    """Words in the reason of a fork."""


def later(line: str, fork: str | None, **more: Any) -> Expected:
    """A call that continues the one before it, or forks for a reason with these words."""
    if fork is None:
        return Expected(line, **more)
    return Expected(line, continuation=frozenset({"fork"}), reason=fork, **more)


@dataclass(frozen=True)
class Plan:
    """See above. `calls` are in the order of completion within each conversation."""

    program: str
    case: str
    prompt: str
    rules: tuple[dict[str, Any], ...]
    files: Mapping[str, str]
    """Path in the workspace -> text that must be there in the end."""
    calls: tuple[Expected, ...]
    absent: tuple[str, ...] = ()
    """Paths that must not be there."""
    faults: tuple[Fault, ...] = ()
    attempts: bool = False
    """Whether calls that do not count may have been recorded beside `calls`: answers that a fault destroyed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the adapter."""
    window: int = 200_000
    """Context window that the program is told of, tokens."""
    deadline_s: float = 180.0

    @property
    def name(self) -> str:
        return f"{self.program}/{self.case}"

    def line(self, rule: str) -> str:
        """The line of this plan that a rule's name stands for; "?" for another plan's, and for the answer to what no rule fits."""
        plan, _, line = rule.rpartition(":")
        return line if plan == self.name else "?"


def rule(name: str, reply: Reply | None = None, **conditions: Any) -> dict[str, Any]:
    """A rule of the script; `if_` is its `if`."""
    if "if_" in conditions:
        conditions["if"] = conditions.pop("if_")
    said = {} if reply is None else {"say": reply.say()}
    return {"name": name, **conditions, **said}
