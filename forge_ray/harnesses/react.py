"""Adapter of `react`, our own small program (`react_program.py`): a chat-completions loop with one bash tool."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from forge_ray.harnesses import react_program
from forge_ray.harnesses.harness import About, Command, Harness, Launch, Missing, Options, exit_text

PROGRAM = ".react/react.py"
INSTRUCTION = ".react/instruction.md"
"""Below HOME: the program travels into the sandbox with its input, so that nothing of this package need be visible there."""


class ReactOptions(Options):
    """Options of `react`; the program's `--help` says more."""

    max_turns: int | None = Field(default=None, ge=1)
    """Replies of the model before the program ends by itself; None = no limit."""
    output_chars: int = Field(default=4000, ge=0)
    """Characters of a command's output that the model sees."""
    command_timeout: float = Field(default=120, gt=0)
    """Seconds after which a command is killed."""
    retry_seconds: float = Field(default=300, ge=0)
    """How long a request that fails in passing is tried again."""
    stream: bool = False
    """Ask for streamed replies."""


class React(Harness):
    Options: ClassVar[type[Options]] = ReactOptions
    options: ReactOptions
    about = About(
        program="a loop of our own with one bash tool",
        dialects=("chat",),
        streams=False,
        key="`Authorization: Bearer`",
        subagents="none",
        traps="Streams with `stream: true`. Its program is one file that travels into the sandbox; it needs bash and Python there.",
    )

    def check(self) -> list[Missing]:
        return [] if shutil.which("bash") else [Missing("bash is not on PATH", "install bash")]

    def configure(self, launch: Launch) -> Command:
        # The interpreter itself, not a virtual environment's link to it: -I -S asks for no more than the standard library.
        interpreter = str(Path(sys.executable).resolve())
        options = self.options
        argv = [interpreter, "-I", "-S", f"{launch.home}/{PROGRAM}", f"{launch.home}/{INSTRUCTION}"]
        argv += ["--base-url", launch.openai_url, "--model", launch.model, "--output-chars", str(options.output_chars)]
        argv += ["--command-timeout", f"{options.command_timeout:g}", "--retry-seconds", f"{options.retry_seconds:g}"]
        if options.max_turns is not None:
            argv += ["--max-turns", str(options.max_turns)]
        if options.stream:
            argv.append("--stream")
        return Command(
            argv=(*argv, *options.arguments),
            env={"FORGE_RAY_KEY": launch.key, **options.environment},
            home_files={PROGRAM: Path(react_program.__file__).read_text(), INSTRUCTION: launch.instruction},
            visible=(sys.base_prefix,),
        )

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        ends = (None, react_program.DONE, react_program.TURN_LIMIT, react_program.REFUSED, react_program.UNREACHABLE)
        return None if exit_code in ends else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "")
        asking = exit_code is None and last.startswith("react: ") and "; next try in " in last
        return last.removeprefix("react: ") if asking or exit_code == react_program.UNREACHABLE else None
