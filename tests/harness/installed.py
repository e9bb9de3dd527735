"""Whether a harness's program is on this machine."""

from __future__ import annotations

import os

import pytest

from forge_ray.harnesses.harness import get

COMPILED = "zeroclaw"
"""Compiled for 20 minutes, so CI tests it only where a cache has it."""


def require(name: str) -> None:
    """Skip the test when the program is missing; with CI=true fail it, where CI installs the program."""
    if missing := get(name).check():
        reason = "; ".join(str(line) for line in missing)
        if os.environ.get("CI") == "true" and COMPILED not in reason:
            pytest.fail(reason)
        pytest.skip(reason)
