"""Adapter of Moonshot's Kimi Code (`kimi -p`), which speaks the chat dialect, streamed.

Prompt mode approves every tool call by itself. A failed run ends with a line `error: failed to run prompt: …` and exit code 1.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text
from forge_ray.harnesses.install.npm import NpmPackage, node
from forge_ray.harnesses.settings import merge, toml

KIMI = NpmPackage("@moonshot-ai/kimi-code", "2.1.0", ".bin/kimi")
FOLDER = ".kimi-code"
FAILED = "error: failed to run prompt: "


class KimiCodeOptions(Options):
    """Options of `kimi_code`."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its `config.toml`, nested as there."""


class KimiCode(Harness):
    Options: ClassVar[type[Options]] = KimiCodeOptions
    options: KimiCodeOptions
    about = About(
        program="Kimi Code (Moonshot)",
        dialects=("chat",),
        streams=True,
        key="`Authorization: Bearer`",
        subagents="`Agent`, blocking; no header (`prompt_cache_key` is the parent's), another system prompt and first message",
        traps="Its reminders come after the instruction, as user messages. After a cut stream it keeps the part of the reply.",
        megabytes=120,
        install_s=14,
        first_request_s=1.1,
    )

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), KIMI

    def configure(self, launch: Launch) -> Command:
        argv = [str(node().executable), str(KIMI.executable), "--output-format", "stream-json"]
        return Command(
            argv=(*argv, *self.options.arguments, "-p", launch.argument()),
            env={"KIMI_CODE_HOME": f"{launch.home}/{FOLDER}", "KIMI_CODE_NO_AUTO_UPDATE": "1", **self.options.environment},
            home_files={f"{FOLDER}/config.toml": toml(merge(self._config(launch), self.options.config))},
            visible=self.visible(),
        )

    def _config(self, launch: Launch) -> dict[str, Any]:
        model = {
            "provider": "forge_ray",
            "model": launch.model,
            "max_context_size": launch.context_window,
            "max_output_size": launch.max_output,
            "capabilities": ["thinking", "tool_use"],
        }
        return {
            "default_model": "policy",
            "telemetry": False,
            "providers": {"forge_ray": {"type": "openai", "base_url": launch.openai_url, "api_key": launch.key}},
            "models": {"policy": model},
        }

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        return None if exit_code in (0, None) or FAILED in log else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        _, failed, words = log.rpartition(FAILED)
        return words.splitlines()[0][:300] if failed and words.startswith("provider.") else None
