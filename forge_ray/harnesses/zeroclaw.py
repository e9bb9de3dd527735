"""Adapter of ZeroClaw (`zeroclaw agent`), a Rust program that speaks the chat, responses or messages dialect and never streams.

Its defaults are not meant for such work, and are all replaced: a risk profile that denies the shell (exit code 0, nothing done), tool
calls as XML text, 120 s a request, a window of 32,768 tokens, ten tool calls a run, a detector of loops that edits the system message.
Its prompt is the program's own with seven tools instead of 44 (`config` brings more). It runs once per configuration directory at a time.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text
from forge_ray.harnesses.install.cargo import CargoPackage
from forge_ray.harnesses.settings import merge, toml

ZEROCLAW = CargoPackage("zeroclaw", "0.8.7", "bin/zeroclaw", features=("agent-runtime",), rust=(1, 96))
FOLDER = ".zeroclaw"
TOOLS = ["shell", "file_read", "file_write", "file_edit", "glob_search", "content_search", "spawn_subagent"]
UNLIMITED = 4294967295
OWN_END = ("The request is too large", "This request exceeds", "The model provider returned an invalid semantic completion")
"""Its last words, after `Error: `, when the policy filled the window (it looks at the usage reported to it) or replied with nothing ten
times: no crash."""
NO_ANSWER = re.compile(r"Error: ((?:The selected model|The model provider \S+ (?:rejected|has)|Cannot reach|The local model server).*)")


class ZeroClawOptions(Options):
    """Options of `zeroclaw`."""

    dialect: Literal["chat", "responses", "messages"] = "chat"
    """Dialect of the proxy that it speaks."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its `config.toml`, nested as there: `{"runtime_profiles": {"long": {"max_tool_iterations": 20}}}`."""


class ZeroClaw(Harness):
    Options: ClassVar[type[Options]] = ZeroClawOptions
    options: ZeroClawOptions
    about = About(
        program="ZeroClaw",
        dialects=("chat", "responses", "messages"),
        streams=False,
        key="`Authorization: Bearer`, as `messages` `x-api-key`",
        subagents="`spawn_subagent`, blocking; no header and the same system prompt: only the first message differs",
        traps="Ignores `retry-after` and a reply's being cut, and ends with exit code 1 where the usage reported to it exceeds the window.",
        megabytes=69,
        install_s=1020,
        first_request_s=0.04,
    )

    def packages(self) -> tuple[CargoPackage, ...]:
        return (ZEROCLAW,)

    def configure(self, launch: Launch) -> Command:
        config = toml(merge(self._config(launch), self.options.config))
        return Command(
            argv=(str(ZEROCLAW.executable), "agent", "-a", "main", *self.options.arguments, "-m", launch.argument()),
            env={"ZEROCLAW_CONFIG_DIR": f"{launch.home}/{FOLDER}", **self.options.environment},
            home_files={f"{FOLDER}/config.toml": config},
            visible=self.visible(),
        )

    def _config(self, launch: Launch) -> dict[str, Any]:
        messages = self.options.dialect == "messages"
        provider = {
            "uri": launch.base_url if messages else launch.openai_url,
            "api_key": launch.key,
            "model": launch.model,
            "wire_api": "responses" if self.options.dialect == "responses" else None,
            "native_tools": True,
            "timeout_secs": 3600,
            "context_window": launch.context_window,
            # Without a cap of its own the messages dialect is asked for 4,096 tokens, and a reply that is cut there ends the run unnoticed.
            "max_tokens": launch.max_output or (launch.context_window if messages else None),
        }
        family = "anthropic" if messages else "custom"
        agent = {
            "model_provider": f"{family}.proxy",
            "risk_profile": "open",
            "runtime_profile": "long",
            "workspace": {"path": launch.workspace, "unrestricted_filesystem": True},
            "memory": {"backend": "none"},
        }
        risk = {
            "level": "full",
            "workspace_only": False,
            "allowed_commands": ["*"],
            "forbidden_paths": [],
            "require_approval_for_medium_risk": False,
            "block_high_risk_commands": False,
            "auto_approve": ["*"],
            "always_ask": [],
            "sandbox_enabled": False,
            "allowed_tools": TOOLS,
        }
        runtime = {
            "agentic": True,
            "max_tool_iterations": 200,
            "max_actions_per_hour": UNLIMITED,
            "max_cost_per_day_cents": UNLIMITED,
            "shell_timeout_secs": 600,
            "max_context_tokens": 0,
            "strict_tool_parsing": True,
        }
        return {
            "schema_version": 3,
            "providers": {"models": {family: {"proxy": provider}}},
            "agents": {"main": agent},
            "risk_profiles": {"open": risk},
            "runtime_profiles": {"long": runtime},
            "memory": {"backend": "none", "auto_save": False},
            "pacing": {"loop_detection_enabled": False},
            "reliability": {"provider_retries": 8, "provider_backoff_ms": 500},
        }

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        if exit_code in (0, None) or self.no_answer(exit_code, log):
            return None
        return None if log.rpartition("Error: ")[2].startswith(OWN_END) else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        found = NO_ANSWER.findall(log[-2000:]) if exit_code == 1 else []
        return found[-1] if found else None
