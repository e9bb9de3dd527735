"""Why a prompt does not go on from the call before it, in one line that a user can act on.

What the harness changed is seen in the histories of the two requests; what the chat template changed, in the tokens. The line says which
of the two it was where that can be told, and shows the first token that differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_ray.serve_proxy.history import History
from forge_ray.serve_proxy.prompt_tree import PromptTree, Recorded, common_prefix
from forge_ray.serve_proxy.splice import REACH, Miss
from forge_ray.serve_proxy.turns import Turn, TurnReader, shown

LENGTH = 320
"""Characters of a reason."""
WINDOW = 6
"""Tokens of a differing place that are shown as text."""


def of_miss(miss: Miss, history: History | None) -> str:
    """The new prompt has all of the call's prompt, but not its reply."""
    found = miss.difference
    if found is None:
        return _line(f"the reply of the call before does not follow: {miss.words}")
    kept = _kept(miss.call, history)
    if found.part == "reasoning" and (found.missing or (kept is not None and not kept.reasoning.strip())):
        return _line(f"thinking of the reply dropped {_by(kept is None, kept is not None and bool(kept.reasoning.strip()))}")
    if found.part == "text" and found.missing:
        return _line(f"text of the reply dropped {_by(kept is None, kept is not None and bool(kept.text.strip()))}: {found.words}")
    if found.part == "calls" and kept is not None and kept.calls and found.missing:
        return "the chat template renders the tool calls so that the server's tool parser does not find them"
    if found.part in ("reasoning", "text"):
        return _line(f"{found.part} of the reply differs {found.words}")
    return _line(found.words)


def of_change(tree: PromptTree, prompt: np.ndarray, history: History | None, before: Recorded, reader: TurnReader | None) -> str:
    """The new prompt leaves `before`'s inside of its prompt, or goes another way behind it."""
    rendered = tree.rendered(before)
    at = common_prefix(rendered, prompt)
    place = "" if at == len(rendered) else f" ({_token(rendered, prompt, at, reader)})"
    return _line(_what(history, before, at < before.rendered - REACH) + place)


def of_splice(before: Recorded, rerendered: Sequence[int], reader: TurnReader | None) -> str:
    """What was put back: where the reply as rendered first differs from what was sampled."""
    there = np.asarray(rerendered, dtype=np.int32)
    return _line(f"the reply came back in other tokens ({_token(before.ids, there, common_prefix(before.ids, there), reader)})")


def _what(history: History | None, before: Recorded, early: bool) -> str:
    """`early`: the prompts part before the end of the earlier one."""
    if history is None or before.prints is None or before.head is None:
        return "an earlier part of the prompt changed"
    if before.head[0] != history.system:
        return "the system message changed"
    if before.head[1] != history.tools:
        return "the declared tools changed" if history.tools else "no tools are declared any more"
    old, new = before.prints, history.prints
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    number = history.first + same
    if same == len(old) == len(new):
        return "the same history is rendered otherwise"
    if same == len(new):
        return f"the history ends earlier: items from {number} on are gone"
    if same == len(old):
        if history.roles[same] != "assistant":
            return "the reply of the call before is missing from the history"
        if early and "system" in history.roles[same:]:
            return "a system message inside the conversation moved to the front: the chat template takes one only there"
        return "the chat template renders the history otherwise once a reply follows"
    if same == len(old) - 1 and history.roles[same] == "assistant":
        return f"the last message of the call before (item {number}) was transient: it is gone"
    return f"{history.roles[same]} item {number} changed"


def _kept(call: Recorded, history: History | None) -> Turn | None:
    """The reply as the harness sends it back."""
    if history is None or call.prints is None or len(call.prints) >= len(history.roles):
        return None
    return history.reply(len(call.prints))


def _by(unknown: bool, kept: bool) -> str:
    return "by the harness or the chat template" if unknown else "by the chat template" if kept else "by the harness"


def _token(old: np.ndarray, new: np.ndarray, at: int, reader: TurnReader | None) -> str:
    one, other = old[at : at + WINDOW].tolist(), new[at : at + WINDOW].tolist()
    if reader is None:
        return f"token {at}: {one} became {other}"
    before, after = shown(reader.decode(one)), shown(reader.decode(other))
    if before == after:  # the same text, cut into other tokens
        before, after = shown(reader.decode(one[:1])), shown(reader.decode(other[:1]))
    return f"token {at}: {before} became {after}"


def _line(text: str) -> str:
    return " ".join(text.split())[:LENGTH]
