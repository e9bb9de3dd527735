"""Adapter of Anthropic's Claude Code (`claude -p`), which speaks the messages dialect, streamed.

It is told the real window of the policy, since for a model name it does not know it would assume one of its own and compact by it. It asks
for 32,000 output tokens unless told otherwise; the proxy takes such a number as an upper bound.
"""

from __future__ import annotations

from typing import ClassVar

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text, json_lines
from forge_ray.harnesses.install.npm import NpmPackage, machine


class ClaudeCode(Harness):
    Options: ClassVar[type[Options]] = Options

    about = About(
        program="Claude Code (Anthropic)",
        dialects=("messages",),
        streams=True,
        key="`x-api-key`",
        subagents="`Agent`, in the background, its result starts a new turn; header `x-claude-code-agent-id`",
        traps="Returns tool arguments in the order of their schema, with defaults filled in.",
        megabytes=384,
        install_s=22,
        first_request_s=0.3,
    )

    def packages(self) -> tuple[NpmPackage, ...]:
        # A native program with its own runtime, in a package per platform.
        name = "@anthropic-ai/claude-code"
        return (NpmPackage(name, "2.1.332", f"{name}-linux-{machine()}/claude"),)

    def configure(self, launch: Launch) -> Command:
        (claude,) = self.packages()
        argv = [str(claude.executable), "-p", *([] if launch.long else [launch.instruction]), "--output-format", "json"]
        argv.append("--dangerously-skip-permissions")
        env = {
            "ANTHROPIC_BASE_URL": launch.base_url,
            "ANTHROPIC_API_KEY": launch.key,
            "ANTHROPIC_MODEL": launch.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(launch.context_window),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "IS_SANDBOX": "1",  # it refuses to skip permissions as root elsewhere
        }
        if launch.max_output is not None:
            env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(launch.max_output)
        return Command(
            argv=(*argv, *self.options.arguments),
            env={**env, **self.options.environment},
            stdin=launch.instruction if launch.long else None,
            visible=self.visible(),
        )

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        # Its report of a finished run, good or bad, is one JSON object of this type.
        return None if exit_code in (0, None) or '"type":"result"' in log else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        for event in json_lines(log):
            text = str(event.get("result"))
            if event.get("type") == "result" and event.get("is_error") and text.startswith("API Error"):
                return text[:300]
        return None
