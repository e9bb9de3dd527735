"""Chat messages, one JSON object per conversation: what `datasets` and supervised trainers (TRL's `SFTTrainer`) read.

    messages       [{"role", "content"}, …]: the longest prompt of the conversation and the reply to it
    exact          the policy's template makes of `messages` exactly the text that the engine saw, and there was nothing but text
    media          digests of the images and the like in it: their placeholders are in `messages`, they themselves are not stored
    rollout call conversation kind task harness outcome reward group step purpose

A history that a harness rewrote (a compaction, a fork) gives one line for each of its versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.export.text import Text, leaves

FACTS = ("rollout", "task", "harness", "outcome", "reward", "group", "step", "purpose")
"""Columns of the rollout that go with each line."""


def lines(row: Mapping[str, Any], calls: Sequence[Call], text: Text) -> Iterator[dict[str, Any]]:
    """The lines of one rollout."""
    for call in leaves(calls):
        messages, exact = text.conversation(call)
        own = {"messages": messages, "exact": exact and not call.media, "media": call.media}
        own |= {"call": call.id, "conversation": call.conversation, "kind": call.kind}
        yield own | {name: row[name] for name in FACTS}
