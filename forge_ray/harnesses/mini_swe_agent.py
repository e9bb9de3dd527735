"""Adapter of mini-swe-agent (`mini`), which speaks the chat dialect and never streams.

Its model hands the work in by a shell command of its own, so its last reply is a tool call; a reply without one is answered with a
complaint. It ends with exit code 0 however it went.
"""

from __future__ import annotations

from typing import ClassVar

from forge_ray.harnesses.harness import Command, Harness, Launch, Options
from forge_ray.harnesses.install.python import PythonPackage

MINI = PythonPackage("mini-swe-agent", "2.4.6")


class MiniSweAgentOptions(Options):
    """Options of `mini_swe_agent`."""


class MiniSweAgent(Harness):
    Options: ClassVar[type[Options]] = MiniSweAgentOptions

    def packages(self) -> tuple[PythonPackage, ...]:
        return (MINI,)

    def configure(self, launch: Launch) -> Command:
        trajectory = f"{launch.home}/trajectory.json"
        argv = [str(MINI.executable), "-m", "minisweagent.run.mini", "-y", "--exit-immediately", "-m", f"openai/{launch.model}"]
        env = {
            "OPENAI_API_KEY": launch.key,
            "OPENAI_API_BASE": launch.openai_url,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        return Command(
            argv=(*argv, "-o", trajectory, *self.options.arguments, "-t", launch.argument()),
            env={**env, **self.options.environment},
            visible=self.visible(),
        )
