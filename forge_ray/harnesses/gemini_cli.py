"""Adapter of Google's Gemini CLI (`gemini`), which speaks the gemini dialect, streamed.

It is always given the model's name: without one it first asks a small model which to use, and again until the answer is JSON of its own
kind. For a name it does not know it assumes a window of 1,048,576 tokens, which cannot be told otherwise; the share of it at which it
compacts can, and is set to 70 % of the policy's window. Its last event is a `result`; its exit code after an error is the HTTP status
modulo 256.
"""

from __future__ import annotations

from typing import Any, ClassVar

from forge_ray.harnesses.gemini_family import GeminiFamily, GeminiFamilyOptions
from forge_ray.harnesses.harness import About, Command, Launch, Options
from forge_ray.harnesses.install.npm import NpmPackage, node

GEMINI = NpmPackage("@google/gemini-cli", "0.61.0", ".bin/gemini")
ASSUMED_WINDOW = 1_048_576
"""Tokens that it assumes for an unknown model."""


class GeminiCliOptions(GeminiFamilyOptions):
    """Options of `gemini_cli`."""


class GeminiCli(GeminiFamily):
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
        return self.command(launch, argv, env, ".gemini", self._settings(launch))

    def _settings(self, launch: Launch) -> dict[str, Any]:
        cap = {} if launch.max_output is None else {"generateContentConfig": {"maxOutputTokens": launch.max_output}}
        return {
            "modelConfigs": {"customOverrides": [{"match": {"model": launch.model}, "modelConfig": cap}]},
            "general": {"enableAutoUpdateNotification": False},
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "model": {"compressionThreshold": 0.7 * launch.context_window / ASSUMED_WINDOW},
        }
