"""Adapters that speak another dialect than their program does by default: a run names each harness once."""

from __future__ import annotations

from forge_ray.harnesses.opencode import OpenCode, OpenCodeOptions
from forge_ray.harnesses.zeroclaw import ZeroClaw, ZeroClawOptions


class OpenCodeResponses(OpenCode):
    class Options(OpenCodeOptions):
        dialect: str = "responses"  # pyright: ignore[reportIncompatibleVariableOverride]


class OpenCodeMessages(OpenCode):
    class Options(OpenCodeOptions):
        dialect: str = "messages"  # pyright: ignore[reportIncompatibleVariableOverride]


class ZeroClawResponses(ZeroClaw):
    class Options(ZeroClawOptions):
        dialect: str = "responses"  # pyright: ignore[reportIncompatibleVariableOverride]


class ZeroClawMessages(ZeroClaw):
    class Options(ZeroClawOptions):
        dialect: str = "messages"  # pyright: ignore[reportIncompatibleVariableOverride]
