"""The wire protocols that the scripted upstream speaks, each a module with the functions of `base.Wire`."""

from __future__ import annotations

from forge_ray.conformance.dialects import chat, gemini, messages, responses
from forge_ray.conformance.dialects.base import Wire

ALL: tuple[Wire, ...] = (chat.Chat(), responses.Responses(), messages.Messages(), gemini.Gemini())


def of(path: str) -> Wire | None:
    """The dialect of a route that asks for a completion; None for every other route. A prefix of the path is allowed."""
    return next((wire for wire in ALL if wire.serves(path)), None)


def named(name: str) -> Wire:
    """The dialect `name`: chat | responses | messages | gemini."""
    return next(wire for wire in ALL if wire.name == name)
