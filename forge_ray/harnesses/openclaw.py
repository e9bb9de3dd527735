"""Adapter of OpenClaw (`openclaw agent exec`), which speaks the chat dialect, streamed.

`agent exec` is one agent without the gateway: it has no sub-agents, which need one. Its own deadline of ten minutes is put out of the
way. It asks hosts on the internet for nothing. Its report is one JSON object, the last thing on its standard output, and has the error of
a failed run.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text
from forge_ray.harnesses.install.npm import NpmPackage, node
from forge_ray.harnesses.settings import merge

OPENCLAW = NpmPackage("openclaw", "2026.9.6", ".bin/openclaw")
CONFIG, MESSAGE = ".openclaw/openclaw.json", ".openclaw/instruction.md"
DEADLINE_S = 30 * 24 * 3600
"""Ours is what counts."""


class OpenClawOptions(Options):
    """Options of `openclaw`."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its configuration, nested as there."""


class OpenClaw(Harness):
    Options: ClassVar[type[Options]] = OpenClawOptions
    options: OpenClawOptions
    about = About(
        program="OpenClaw",
        dialects=("chat",),
        streams=True,
        key="`Authorization: Bearer`",
        subagents="`sessions_spawn` behind `tool_call`, with a gateway only: none here",
        traps="Every request ends with a message of its own that the next one leaves out, so calls do not extend one another. "
        "`_`, `-` and `.` are taken out of call ids. A retry changes the user's message.",
        megabytes=647,
        install_s=37,
        first_request_s=8.0,
    )

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), OPENCLAW

    def configure(self, launch: Launch) -> Command:
        model = f"forge_ray/{launch.model}"
        argv = [str(node().executable), str(OPENCLAW.executable), "agent", "exec"]
        argv += ["--config", f"{launch.home}/{CONFIG}", "--cwd", launch.workspace]
        argv += ["--model", model, "--json", "--timeout", str(DEADLINE_S), "--message-file", f"{launch.home}/{MESSAGE}"]
        config = merge(self._config(launch, model), self.options.config)
        return Command(
            argv=(*argv, *self.options.arguments),
            env=dict(self.options.environment),
            home_files={CONFIG: json.dumps(config, indent=2), MESSAGE: launch.instruction},
            visible=self.visible(),
        )

    def _config(self, launch: Launch, model: str) -> dict[str, Any]:
        output = launch.max_output or min(32_000, launch.context_window // 2)
        listed = {"id": launch.model, "name": launch.model, "contextWindow": launch.context_window, "maxTokens": output}
        provider = {"baseUrl": launch.openai_url, "apiKey": launch.key, "api": "openai-completions", "models": [listed]}
        defaults = {"model": {"primary": model}, "workspace": launch.workspace, "skipBootstrap": True}
        return {"models": {"providers": {"forge_ray": provider}}, "agents": {"defaults": defaults}}

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        return None if exit_code in (0, None) or re.search(r'^  "ok": (true|false),$', log, re.MULTILINE) else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        report = log[log.rfind('\n{\n  "ok": false,') :]
        error = re.search(r'"error": {\s*"message": ("(?:[^"\\]|\\.)*")', report)
        words = json.loads(error[1]) if error else ""
        return words[:300] if "request failed" in words else None
