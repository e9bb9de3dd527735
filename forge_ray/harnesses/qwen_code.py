"""Adapter of Qwen Code (`qwen`), which speaks the chat dialect, streamed.

It cuts its own cap on a reply to what its estimate leaves of the window, and asks again with a larger one when a reply is cut, unless the
run has a cap. Its last event is a `result`, whose error is the model API's where it begins so; the exit code is 1 then.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text, json_lines
from forge_ray.harnesses.install.npm import NpmPackage, node
from forge_ray.harnesses.settings import merge

QWEN = NpmPackage("@qwen-code/qwen-code", "0.24.4", ".bin/qwen")


class QwenCodeOptions(Options):
    """Options of `qwen_code`."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its `settings.json`, nested as there."""


class QwenCode(Harness):
    Options: ClassVar[type[Options]] = QwenCodeOptions
    options: QwenCodeOptions
    about = About(
        program="Qwen Code (Alibaba)",
        dialects=("chat",),
        streams=True,
        key="`Authorization: Bearer`",
        subagents="`agent`, in the background; no header, another system prompt and first message",
        traps="Strips white space at the ends of reasoning. After a cut stream it keeps the part and asks to go on.",
        megabytes=152,
        install_s=7,
        first_request_s=1.6,
    )

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), QWEN

    def configure(self, launch: Launch) -> Command:
        argv = [str(node().executable), str(QWEN.executable), "--yolo", "--auth-type", "openai", "-o", "stream-json"]
        env = {"OPENAI_API_KEY": launch.key, "OPENAI_BASE_URL": launch.openai_url, "OPENAI_MODEL": launch.model}
        env["QWEN_CODE_SUPPRESS_YOLO_WARNING"] = "1"
        if launch.max_output is not None:
            env["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(launch.max_output)
        return Command(
            argv=(*argv, *self.options.arguments, *(() if launch.long else ("-p", launch.instruction))),
            env={**env, **self.options.environment},
            home_files={".qwen/settings.json": json.dumps(merge(self._settings(launch), self.options.settings), indent=2)},
            stdin=launch.instruction if launch.long else None,
            visible=self.visible(),
        )

    def _settings(self, launch: Launch) -> dict[str, Any]:
        return {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "security": {"auth": {"selectedType": "openai"}},
            "model": {"generationConfig": {"contextWindowSize": launch.context_window}},
        }

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        return None if exit_code in (0, None) or '"type":"result"' in log else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        for event in json_lines(log):
            error = event.get("error") if event.get("type") == "result" else None
            if isinstance(error, dict) and str(error.get("message")).startswith("[API Error"):
                return str(error["message"])[:300]
        return None
