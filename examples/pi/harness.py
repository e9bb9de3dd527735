"""Adapter of Pi (`pi -p`), a coding agent from npm: an example of a harness in one file. `harnesses: [{name: examples/pi/harness.py:Pi}]`

Pi finds models and their providers in a file of its home, and speaks three of the proxy's dialects. Its exit code is 0 even when the
model's API failed: the last turn among its events tells.
"""

from __future__ import annotations

import json
from typing import ClassVar, Literal

from forge_ray.harnesses.harness import Command, Harness, Launch, Options, exit_text, json_lines
from forge_ray.harnesses.install.npm import NpmPackage, node

PI = NpmPackage("@earendil-works/pi-coding-agent", "1.6.0", ".bin/pi")
API = {"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"}


class PiOptions(Options):
    """Options of this adapter, beside `arguments` and `environment`."""

    dialect: Literal["chat", "responses", "messages"] = "chat"
    """Dialect of the proxy that it speaks."""


class Pi(Harness):
    Options: ClassVar[type[Options]] = PiOptions
    options: PiOptions

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), PI

    def configure(self, launch: Launch) -> Command:
        argv = [str(node().executable), str(PI.executable), "-p", "--mode", "json", "--provider", "forge_ray", "--model", launch.model]
        return Command(
            argv=(*argv, *self.options.arguments, launch.argument()),
            env={"PI_OFFLINE": "1", **self.options.environment},
            home_files={".pi/agent/models.json": json.dumps({"providers": {"forge_ray": self._provider(launch)}}, indent=2)},
            visible=self.visible(),
        )

    def _provider(self, launch: Launch) -> dict[str, object]:
        model = {
            "id": launch.model,
            "contextWindow": launch.context_window,
            "maxTokens": launch.max_output or min(32_000, launch.context_window // 2),
        }
        url = launch.base_url if self.options.dialect == "messages" else launch.openai_url
        return {"baseUrl": url, "apiKey": launch.key, "api": API[self.options.dialect], "models": [model]}

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        return None if exit_code in (0, None) or '"type":"agent_end"' in log else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        for event in json_lines(log):
            message = event.get("message")
            if event.get("type") == "turn_end" and isinstance(message, dict):
                return str(message.get("errorMessage"))[:300] if message.get("stopReason") == "error" else None
        return None
