"""How the call log can fail. What is wrong in a log that was written before is no failure but a `Problem`."""

from __future__ import annotations

from forge_ray.errors import ForgeRayError


class CallLogError(ForgeRayError):
    """The log cannot be written or read: a full disk, an I/O error, an event that is no JSON. What was to be logged is not."""
