"""Adapters that speak another dialect than their program does by default: a run names each harness once."""

from __future__ import annotations

from typing import Literal

from forge_ray.harnesses.opencode import OpenCode, OpenCodeOptions
from forge_ray.harnesses.zeroclaw import ZeroClaw, ZeroClawOptions

Dialect = Literal["chat", "responses", "messages"]


class OpenCodeResponses(OpenCode):
    class Options(OpenCodeOptions):
        dialect: Dialect = "responses"


class OpenCodeMessages(OpenCode):
    class Options(OpenCodeOptions):
        dialect: Dialect = "messages"


class ZeroClawResponses(ZeroClaw):
    class Options(ZeroClawOptions):
        dialect: Dialect = "responses"


class ZeroClawMessages(ZeroClaw):
    class Options(ZeroClawOptions):
        dialect: Dialect = "messages"
