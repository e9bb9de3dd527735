"""Adapter of OpenAI's Codex CLI (`codex exec`), which speaks the responses dialect only, streamed.

It is given a provider of its own rather than the built-in one: that would first try a WebSocket several times and expects special
items when it compacts. Its home must not lie below the system's temporary directory (it then leaves out its helper programs).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text, json_lines
from forge_ray.harnesses.install.npm import NpmPackage, node

KEY = "FORGE_RAY_KEY"
CODEX = NpmPackage("@openai/codex", "0.171.0", "@openai/codex/bin/codex.js")
"""A launcher for Node that replaces itself by the native program beside it."""


class CodexOptions(Options):
    """Options of `codex`."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of Codex's `config.toml`, dotted: `{"tools.view_image": false}`."""


class Codex(Harness):
    Options: ClassVar[type[Options]] = CodexOptions
    options: CodexOptions
    about = About(
        program="Codex CLI (OpenAI)",
        dialects=("responses",),
        streams=True,
        key="`Authorization: Bearer`",
        subagents="`spawn_agent`, concurrent; headers `x-openai-subagent`, `x-codex-parent-thread-id` and a `thread-id` of its own",
        traps="A 429 without `retry-after` ends it. A reply that is cut at its length fails its turn (exit code 1).",
        megabytes=424,
        install_s=12,
        first_request_s=0.3,
    )

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), CODEX

    def configure(self, launch: Launch) -> Command:
        argv = [str(node().executable), str(CODEX.executable), "exec", "--skip-git-repo-check", "--json", "-C", launch.workspace]
        argv += ["--disable", "plugins", "--disable", "apps"]  # both ask hosts on the internet
        for key, value in self.options.config.items():
            argv += ["-c", f"{key}={json.dumps(value)}"]  # JSON's scalars and lists are TOML's
        return Command(
            argv=(*argv, *self.options.arguments, "-" if launch.long else launch.instruction),
            env={KEY: launch.key, "CODEX_HOME": f"{launch.home}/.codex", **self.options.environment},
            home_files={".codex/config.toml": self._toml(launch)},
            stdin=launch.instruction if launch.long else None,
            visible=self.visible(),
        )

    def _toml(self, launch: Launch) -> str:
        return "\n".join(
            [
                f"model = {json.dumps(launch.model)}",
                'model_provider = "forge_ray"',
                f"model_context_window = {launch.context_window}",
                'approval_policy = "never"',
                'sandbox_mode = "danger-full-access"',
                "check_for_update_on_startup = false",
                "",
                "[analytics]",
                "enabled = false",
                "",
                "[model_providers.forge_ray]",
                'name = "forge_ray"',
                f"base_url = {json.dumps(launch.openai_url)}",
                f"env_key = {json.dumps(KEY)}",
                'wire_api = "responses"',
                "",
            ]
        )

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        # With --json it ends every run it has finished by one of these events, whatever its exit code.
        if exit_code in (0, None) or any(event in log for event in ('"type":"turn.completed"', '"type":"turn.failed"')):
            return None
        return exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        for event in json_lines(log):
            if event.get("type") == "turn.failed":
                error = event.get("error")
                return str(error.get("message") if isinstance(error, dict) else error)[:300]
        return None
