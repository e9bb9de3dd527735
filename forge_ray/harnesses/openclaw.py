"""Adapter of OpenClaw (`openclaw agent exec`), which speaks the chat dialect, streamed.

`agent exec` is one agent without the gateway: it has no sub-agents, which need one. Each of its requests ends with a message that the next
one leaves out, so no call of a run extends another.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import Command, Harness, Launch, Options
from forge_ray.harnesses.install.npm import NpmPackage, node
from forge_ray.harnesses.settings import merge

OPENCLAW = NpmPackage("openclaw", "2026.9.6", ".bin/openclaw")
CONFIG = ".openclaw/openclaw.json"


class OpenClawOptions(Options):
    """Options of `openclaw`."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its configuration, nested as there."""


class OpenClaw(Harness):
    Options: ClassVar[type[Options]] = OpenClawOptions
    options: OpenClawOptions

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), OPENCLAW

    def configure(self, launch: Launch) -> Command:
        config, model = f"{launch.home}/{CONFIG}", f"forge_ray/{launch.model}"
        argv = [str(node().executable), str(OPENCLAW.executable), "agent", "exec", "--config", config, "--cwd", launch.workspace]
        return Command(
            argv=(*argv, "--model", model, "--json", *self.options.arguments, launch.argument()),
            env=self.options.environment,
            home_files={CONFIG: json.dumps(merge(self._config(launch, model), self.options.config), indent=2)},
            visible=self.visible(),
        )

    def _config(self, launch: Launch, model: str) -> dict[str, Any]:
        output = launch.max_output or min(32_000, launch.context_window // 2)
        listed = {"id": launch.model, "name": launch.model, "contextWindow": launch.context_window, "maxTokens": output}
        provider = {"baseUrl": launch.openai_url, "apiKey": launch.key, "api": "openai-completions", "models": [listed]}
        defaults = {"model": {"primary": model}, "workspace": launch.workspace, "skipBootstrap": True}
        return {"models": {"providers": {"forge_ray": provider}}, "agents": {"defaults": defaults}}
