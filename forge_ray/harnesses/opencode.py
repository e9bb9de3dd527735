"""Adapter of OpenCode (`opencode run`), which speaks the chat, responses or messages dialect, streamed: it has an SDK for each inside.

It asks for a title of the run at its start, with a prompt of its own and no tools (`arguments: [--title, x]` ends that). Its exit code is 1
after a run that met an error, finished or not: its last event tells. Its settings are a file of its home, so that the workspace holds
nothing of ours.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text, json_lines
from forge_ray.harnesses.install.npm import NpmPackage, machine
from forge_ray.harnesses.settings import merge

SDK = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}
"""Dialect -> the SDK that speaks it. All of them are part of the program."""
FOLDER = ".config/opencode"
NO_INSTALL = {
    f"{FOLDER}/node_modules/.keep": "",
    f"{FOLDER}/package-lock.json": json.dumps({"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}),
}
"""A library for plugins that it would get from npm at every start counts as there: its lock file names it."""


class OpenCodeOptions(Options):
    """Options of `opencode`."""

    dialect: Literal["chat", "responses", "messages"] = "chat"
    """Dialect of the proxy that it speaks."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its `opencode.json`, nested as there."""


class OpenCode(Harness):
    Options: ClassVar[type[Options]] = OpenCodeOptions
    options: OpenCodeOptions
    about = About(
        program="OpenCode",
        dialects=("chat", "responses", "messages"),
        streams=True,
        key="`Authorization: Bearer`, as `messages` `x-api-key`",
        subagents="`task`, blocking; headers `x-session-id` of its own and `x-parent-session-id`",
        traps="Item ids of the responses dialect do not come back.",
        megabytes=177,
        install_s=2,
        first_request_s=2.1,
    )

    def packages(self) -> tuple[NpmPackage, ...]:
        # A native program, in a package per platform.
        name = f"opencode-linux-{machine()}"
        return (NpmPackage(name, "1.18.33", f"{name}/bin/opencode"),)

    def configure(self, launch: Launch) -> Command:
        (opencode,) = self.packages()
        argv = [str(opencode.executable), "run", "--format", "json", "--auto", "-m", f"forge_ray/{launch.model}"]
        env = {
            "OPENCODE_CONFIG": f"{launch.home}/{FOLDER}/opencode.json",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }
        config = merge(self._config(launch), self.options.config)
        return Command(
            argv=(*argv, *self.options.arguments, *(() if launch.long else ("--", launch.instruction))),
            env={**env, **self.options.environment},
            home_files={f"{FOLDER}/opencode.json": json.dumps(config, indent=2), **NO_INSTALL},
            stdin=launch.instruction if launch.long else None,
            visible=self.visible(),
        )

    def _config(self, launch: Launch) -> dict[str, Any]:
        output = launch.max_output or min(32_000, launch.context_window // 2)
        model = {"name": launch.model, "tool_call": True, "limit": {"context": launch.context_window, "output": output}}
        provider = {
            "npm": SDK[self.options.dialect],
            "options": {"baseURL": launch.openai_url, "apiKey": launch.key},
            "models": {launch.model: model},
        }
        return {
            "provider": {"forge_ray": provider},
            "permission": {"*": "allow"},
            "autoupdate": False,
            "share": "disabled",
        }

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        return None if exit_code in (0, None) or self._last(log) in ("error", "step_finish") else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        event = next(iter(json_lines(log)), {})
        error = event.get("error") if event.get("type") == "error" else None
        if not isinstance(error, dict) or error.get("name") != "APIError":
            return None
        data = error.get("data")
        return str(data.get("message") if isinstance(data, dict) else data)[:300]

    def _last(self, log: str) -> str | None:
        return next((event.get("type") for event in json_lines(log)), None)
