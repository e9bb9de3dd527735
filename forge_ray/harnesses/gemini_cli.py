"""Adapter of Google's Gemini CLI (`gemini`), which speaks the gemini dialect, streamed.

It is always given the model's name: without one it first asks a small model which to use, and again until the answer is JSON of its own
kind. For a name it does not know it assumes a window of 1,048,576 tokens, which cannot be told otherwise; the share of it at which it
compacts can, and is set to 70 % of the policy's window. Its last event is a `result`; its exit code after an error is the HTTP status
modulo 256.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text, json_lines
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
    about = About(
        program="Gemini CLI (Google)",
        dialects=("gemini",),
        streams=True,
        key="`x-goog-api-key`",
        subagents="`invoke_agent`, blocking; no header, another system prompt and first message",
        traps="Drops reasoning. A cut stream or a context overflow ends it; every error is waited out for 5 s and more.",
        megabytes=100,
        install_s=3,
        first_request_s=0.8,
    )

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), GEMINI

    def configure(self, launch: Launch) -> Command:
        argv = [str(node().executable), str(GEMINI.executable), "--yolo", "--skip-trust", "-o", "stream-json", "-m", launch.model]
        env = {"GEMINI_API_KEY": launch.key, "GOOGLE_GEMINI_BASE_URL": launch.gemini_url}
        env["GEMINI_CLI_NO_RELAUNCH"] = "true"  # it starts a second Node with a larger heap otherwise, at the cost of seconds
        return Command(
            argv=(*argv, *self.options.arguments, *(() if launch.long else ("-p", launch.instruction))),
            env={**env, **self.options.environment},
            home_files={".gemini/settings.json": json.dumps(merge(self._settings(launch), self.options.settings), indent=2)},
            stdin=launch.instruction if launch.long else None,
            visible=self.visible(),
        )

    def _settings(self, launch: Launch) -> dict[str, Any]:
        cap = {} if launch.max_output is None else {"generateContentConfig": {"maxOutputTokens": launch.max_output}}
        return {
            "modelConfigs": {"customOverrides": [{"match": {"model": launch.model}, "modelConfig": cap}]},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "model": {"compressionThreshold": 0.7 * launch.context_window / ASSUMED_WINDOW},
        }

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        return None if exit_code in (0, None) or '"type":"result"' in log else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        for event in json_lines(log):
            error = event.get("error") if event.get("type") == "result" else None
            if isinstance(error, dict) and str(error.get("message")).startswith("[API Error"):
                return str(error["message"])[:300]
        return None
