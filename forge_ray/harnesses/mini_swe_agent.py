"""Adapter of mini-swe-agent (`mini`), which speaks the chat dialect through LiteLLM and never streams.

Its model hands the work in by a shell command of its own, so the last reply of a run is a tool call; a reply without a tool call is
answered with a complaint, the third in a row ends the run. It knows no context window: it neither compacts nor cuts. Exit code 0 says only
that no exception came up: the word after its last `Exit:` says how the run ended.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from pydantic import Field

from forge_ray.harnesses.harness import About, Command, Harness, Launch, Options, exit_text
from forge_ray.harnesses.install.python import PythonPackage
from forge_ray.harnesses.settings import merge

MINI = PythonPackage("mini-swe-agent", "2.4.6", also=("litellm==1.110.2", "openai==3.57.0"))
CONFIG = ".mini/forge_ray.yaml"
GAVE_UP = ("RepeatedFormatError", "LimitsExceeded", "TimeExceeded")
"""What it prints after `Exit:` when the model did not hand in."""


class MiniSweAgentOptions(Options):
    """Options of `mini_swe_agent`."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of its configuration, laid over its `mini.yaml`: `{"agent": {"step_limit": 30}}`."""


class MiniSweAgent(Harness):
    Options: ClassVar[type[Options]] = MiniSweAgentOptions
    options: MiniSweAgentOptions
    about = About(
        program="mini-swe-agent (SWE-agent)",
        dialects=("chat",),
        streams=False,
        key="`Authorization: Bearer`",
        subagents="none",
        traps="A reply without a tool call does not come back in the next prompt, only the complaint about it does.",
        megabytes=590,
        install_s=7,
        first_request_s=2.2,
    )

    def packages(self) -> tuple[PythonPackage, ...]:
        return (MINI,)

    def configure(self, launch: Launch) -> Command:
        argv = [str(MINI.executable), "-m", "minisweagent.run.mini", "-y", "--exit-immediately", "-m", f"openai/{launch.model}"]
        argv += ["-c", "mini.yaml", "-c", f"{launch.home}/{CONFIG}", "-o", f"{launch.home}/.mini/trajectory.json"]
        cap = {} if launch.max_output is None else {"model_kwargs": {"max_tokens": launch.max_output}}
        config = merge({"run": {"task": launch.instruction}, "agent": {"cost_limit": 0}, "model": cap}, self.options.config)
        env = {
            "OPENAI_API_KEY": launch.key,
            "OPENAI_API_BASE": launch.openai_url,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks GitHub for prices
        }
        return Command(
            argv=(*argv, *self.options.arguments),
            env={**env, **self.options.environment},
            home_files={CONFIG: json.dumps(config, indent=2)},  # YAML holds JSON
            visible=self.visible(),
        )

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        return None if exit_code in (0, None) or self.no_answer(exit_code, log) else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        # An exception of LiteLLM ended it: the traceback's last lines, broken to the width of a terminal.
        found = re.search(r"^\w+: (litellm\.[^│╯]*)\Z", log.strip(), re.MULTILINE) if exit_code not in (0, None) else None
        return " ".join(found[1].split())[:300] if found else None

    def submitted(self, exit_code: int | None, log: str) -> bool:
        _, exit, words = log.rpartition("\nExit:\n")
        return exit_code == 0 and bool(exit) and not words.strip().startswith(GAVE_UP)
