"""Adapter of Google's Gemini CLI (`gemini`), which speaks the gemini dialect, streamed.

It is always given the model's name: without one it first asks a small model which to use, and asks again until the answer is JSON of its
own kind. For a name it does not know it assumes a window of 1,048,576 tokens; the share of it at which it compacts is set so that it is one of the
policy's window.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import Command, Harness, Launch, Options
from forge_ray.harnesses.install.npm import NpmPackage, node
from forge_ray.harnesses.settings import merge

GEMINI = NpmPackage("@google/gemini-cli", "0.61.0", ".bin/gemini")
ASSUMED_WINDOW = 1_048_576
"""Tokens that it assumes for an unknown model."""


class GeminiCliOptions(Options):
    """Options of `gemini_cli`."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its `settings.json`, nested as there."""


class GeminiCli(Harness):
    Options: ClassVar[type[Options]] = GeminiCliOptions
    options: GeminiCliOptions

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), GEMINI

    def configure(self, launch: Launch) -> Command:
        argv = [str(node().executable), str(GEMINI.executable), "--yolo", "--skip-trust", "-o", "json", "-m", launch.model]
        env = {"GEMINI_API_KEY": launch.key, "GOOGLE_GEMINI_BASE_URL": launch.gemini_url}
        return Command(
            argv=(*argv, *self.options.arguments, *(() if launch.long else ("-p", launch.instruction))),
            env={**env, **self.options.environment},
            home_files={".gemini/settings.json": json.dumps(merge(self._settings(launch), self.options.settings), indent=2)},
            stdin=launch.instruction if launch.long else None,
            visible=self.visible(),
        )

    def _settings(self, launch: Launch) -> dict[str, Any]:
        return {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "model": {"compressionThreshold": 0.7 * launch.context_window / ASSUMED_WINDOW},
        }
