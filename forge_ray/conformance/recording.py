"""What the suite asks of a proxy's recording, and the adapter that reads one.

A reader is a class that gives a session's recorded calls in the order of completion, and says how the script's words look there. What a
proxy does not record is None and is not checked. `--reader module:Class` makes one without arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class RecordedCall:
    """One model request as a proxy recorded it."""

    id: str
    prompt: Sequence[int] | str | None
    """What the model was given: token ids, or text."""
    sampled: Sequence[int] | str | None
    """What the model said, of the same type; the end token included."""
    prompt_text: str | None
    """The prompt as text: tells which line of the script answers it."""
    counted: bool
    """Whether this call counts: was whole, reached the program, and was not replaced by a retry. What is trained, or billed once."""
    dialect: str | None = None
    """chat | responses | messages | gemini."""
    kind: str | None = None
    """agent | subagent | compaction | aux."""
    conversation: str | None = None
    """An id that the calls of one conversation share."""
    spawned_by: str | None = None
    """The call whose tool call began this conversation, on its first call."""
    continuation: str | None = None
    """new | exact | spliced | fork: how the prompt continues its conversation."""
    continues: str | None = None
    """The call whose prompt and reply it goes on from, where `continuation` is exact or spliced."""
    reason: str | None = None
    """Why it does not go on, one line."""


class Reader(Protocol):
    """Reads one proxy's recording."""

    turn_mark: str
    """What stands before each assistant message in `prompt_text`, and at its end."""

    async def calls(self, session: str) -> list[RecordedCall]:
        """All calls of `session`; everything its requests caused must be in it. `session` is what stood in the base URL or the key."""
        ...

    def sampled(self, say: str) -> Sequence[int] | str:
        """What must have been recorded as sampled for the words `say`."""
        ...
