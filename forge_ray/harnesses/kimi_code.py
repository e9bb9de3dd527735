"""Adapter of Moonshot's Kimi Code (`kimi -p`), which speaks the chat dialect, streamed.

Prompt mode approves every tool call by itself. Its home is `KIMI_CODE_HOME`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import Command, Harness, Launch, Options
from forge_ray.harnesses.install.npm import NpmPackage, node
from forge_ray.harnesses.settings import merge, toml

KIMI = NpmPackage("@moonshot-ai/kimi-code", "2.1.0", ".bin/kimi")
FOLDER = ".kimi-code"


class KimiCodeOptions(Options):
    """Options of `kimi_code`."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its `config.toml`, nested as there."""


class KimiCode(Harness):
    Options: ClassVar[type[Options]] = KimiCodeOptions
    options: KimiCodeOptions

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), KIMI

    def configure(self, launch: Launch) -> Command:
        argv = [str(node().executable), str(KIMI.executable), "--output-format", "stream-json"]
        return Command(
            argv=(*argv, *self.options.arguments, "-p", launch.argument()),
            env={"KIMI_CODE_HOME": f"{launch.home}/{FOLDER}", **self.options.environment},
            home_files={f"{FOLDER}/config.toml": toml(merge(self._config(launch), self.options.config))},
            visible=self.visible(),
        )

    def _config(self, launch: Launch) -> dict[str, Any]:
        model = {
            "provider": "forge_ray",
            "model": launch.model,
            "max_context_size": launch.context_window,
            "capabilities": ["thinking", "tool_use"],
        }
        return {
            "default_model": "policy",
            "telemetry": False,
            "providers": {"forge_ray": {"type": "openai", "base_url": launch.openai_url, "api_key": launch.key}},
            "models": {"policy": model},
        }
