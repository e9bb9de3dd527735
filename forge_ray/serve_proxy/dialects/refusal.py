"""A request that is answered with an error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """What is wrong, and how clients are told."""

    status: int
    message: str
    param: str | None = None
    """Field of the request that is at fault."""
    code: str | None = None
    """Machine-readable reason in the OpenAI dialects."""
    retry_after_s: int | None = None
    """Seconds after which the same request may succeed."""
