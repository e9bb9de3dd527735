"""What a reward function is given: one finished rollout, with its calls as text and as tokens.

from forge_ray.rewards import Rollout

def brevity(rollout: Rollout) -> float:
    return 1.0 / (1 + len(rollout.final_text))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens written out."""


@dataclass(frozen=True)
class Call:
    """One model request of the harness that ended, with what was sampled."""

    id: str
    kind: str
    """agent, subagent, compaction or aux."""
    conversation: str
    """Calls of one conversation extend one another; a sub-agent has its own."""
    prompt_ids: list[int]
    """Token ids, (n,)."""
    ids: list[int]
    """Sampled token ids with the end token, (m,)."""
    logprobs: list[float]
    """Nats, (m,), under the distribution that was sampled from."""
    status: str
    """finished, or length (cut at its limit), cancelled, failed."""
    delivered: bool | None
    """Whether the reply reached the harness; None: nobody knows."""
    superseded: bool
    """The harness repeated the request, and another call answered it."""
    reply: str | None
    """What the harness was given: answer (no tool call), tool_calls or length; None: cannot be told."""
    _decode: Decode = field(repr=False, compare=False)

    @cached_property
    def prompt(self) -> str:
        """The prompt as text, special tokens written out."""
        return self._decode(self.prompt_ids)

    @cached_property
    def text(self) -> str:
        """What was sampled as text, special tokens written out."""
        return self._decode(self.ids)


@dataclass(frozen=True)
class Rollout:
    """One finished rollout, by the time of its verdict."""

    id: str
    task: str
    """Task name."""
    task_directory: Path
    harness: str
    outcome: str
    """How the harness ended: `ok` or `truncated`."""
    calls: list[Call]
    """By completion; superseded and failed ones too."""
    final_text: str
    """What the policy said last: the text of the last whole call of the outermost agent that the harness got, without special tokens; ""
    where there is none."""
    workspace: Path
    """A copy of the workspace as the harness left it; whatever is done to it is gone afterwards. Its files were written by the policy."""
    rewards: dict[str, float]
    """What the task's verifier gave."""
