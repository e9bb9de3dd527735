"""What Gemini CLI and its fork Qwen Code have in common: a settings file in the home, a stream of JSON events whose last is a `result`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from forge_ray.harnesses.harness import Command, Harness, Launch, Options, exit_text, json_lines
from forge_ray.harnesses.settings import merge

QUIET = {"privacy": {"usageStatisticsEnabled": False}, "telemetry": {"enabled": False}, "general": {"enableAutoUpdate": False}}
"""Settings with which a program of the family talks to its model only."""


class GeminiFamilyOptions(Options):
    """Options of a program of the family."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its `settings.json`, nested as there."""


class GeminiFamily(Harness):
    """Base of the adapters; each says its own command line, environment and settings."""

    options: GeminiFamilyOptions

    def command(self, launch: Launch, argv: Sequence[str], env: Mapping[str, str], home: str, settings: Mapping[str, Any]) -> Command:
        """The program's command. `home`: the directory below HOME that holds its `settings.json`; `settings` go over `QUIET`."""
        written = merge(merge(QUIET, settings), self.options.settings)
        return Command(
            argv=(*argv, *self.options.arguments, *(() if launch.long else ("-p", launch.instruction))),
            env={**env, **self.options.environment},
            home_files={f"{home}/settings.json": json.dumps(written, indent=2)},
            stdin=launch.instruction if launch.long else None,
            visible=self.visible(),
        )

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        return None if exit_code in (0, None) or '"type":"result"' in log else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        for event in json_lines(log):
            error = event.get("error") if event.get("type") == "result" else None
            if isinstance(error, dict) and str(error.get("message")).startswith("[API Error"):
                return str(error["message"])[:300]
        return None
