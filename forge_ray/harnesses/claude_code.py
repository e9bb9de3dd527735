"""Adapter of Anthropic's Claude Code (`claude -p`), which speaks the messages dialect, streamed.

It is told the real window of the policy, since for a model name it does not know it would assume one of its own and compact by it. It asks
for 32,000 output tokens unless told otherwise; the proxy takes such a number as an upper bound.
"""

from __future__ import annotations

from typing import ClassVar

from forge_ray.harnesses import install
from forge_ray.harnesses.harness import Command, Harness, Launch, Missing, Options, exit_text, json_lines

MAX_ARGUMENT = 120_000
"""Bytes; Linux refuses a single argument of 128 KiB."""


class ClaudeCode(Harness):
    Options: ClassVar[type[Options]] = Options

    def check(self) -> list[Missing]:
        package = install.claude_code()
        if package.installed():
            return []
        return [Missing(f"{package.name} {package.version} is not installed", f"run {install.INSTALL} {self.name}")]

    def install(self) -> None:
        install.install(install.claude_code())

    def configure(self, launch: Launch) -> Command:
        claude = install.claude_code()
        long = len(launch.instruction.encode()) > MAX_ARGUMENT
        argv = [str(claude.executable), "-p", *([] if long else [launch.instruction]), "--output-format", "json"]
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
            stdin=launch.instruction if long else None,
            visible=(str(claude.folder),),
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
