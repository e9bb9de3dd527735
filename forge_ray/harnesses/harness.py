"""What a harness adapter is: how one agent program is found, installed, pointed at the proxy and started, and how its crash looks.

An adapter is a class with a few questions to answer, one of them a must; everything else about a rollout is the same for every
program. `docs/harnesses.md` is made from the built-in ones. Bring your own as `file.py:Class`, a subclass of `Harness`:

    class Mine(Harness):
        def configure(self, launch):
            return Command(argv=("my-agent", launch.instruction), env={"OPENAI_BASE_URL": launch.openai_url, "OPENAI_API_KEY": launch.key})

Invariants: `configure` is pure (no file is touched: what it wants to exist is in the `Command`), two launches that differ in nothing but
URL and key differ in nothing else, and an adapter never decides how a rollout went; it only says whether the program crashed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import shlex
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_ray import __version__
from forge_ray.errors import UserError
from forge_ray.harnesses.install.package import INSTALL, Package

MAX_ARGUMENT = 120_000
"""Bytes; Linux refuses a single argument of 128 KiB."""


@dataclass(frozen=True)
class Launch:
    """One rollout, as the program will meet it. Paths are those inside the sandbox."""

    instruction: str
    workspace: str
    """The directory the task is about; the program's working directory."""
    home: str
    base_url: str
    """`http://HOST:PORT/s/TOKEN`, without `/v1` and without a slash at the end."""
    key: str
    """API key, the same token."""
    model: str
    """Model name to ask for."""
    context_window: int
    """Tokens of prompt and reply together."""
    max_output: int | None = None
    """Upper bound of one reply in tokens, where the run has one."""

    @property
    def openai_url(self) -> str:
        """Base URL as OpenAI clients want it."""
        return f"{self.base_url}/v1"

    @property
    def gemini_url(self) -> str:
        """Base URL as Gemini clients want it: they add `/v1beta` themselves."""
        return self.base_url

    @property
    def long(self) -> bool:
        """Whether the instruction is too long to be an argument."""
        return len(self.instruction.encode()) > MAX_ARGUMENT

    def argument(self) -> str:
        """The instruction, for a program that takes it as an argument only. Raises `UserError` where it is too long for one."""
        if self.long:
            problem = f"the instruction has {len(self.instruction.encode())} bytes, and this program takes it as an argument only"
            raise UserError(problem, where="instruction", fix=f"shorten it to {MAX_ARGUMENT} bytes")
        return self.instruction


@dataclass(frozen=True)
class Command:
    """What to run, and what must be there first."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Added to the sandbox's own environment (HOME, PATH, LANG …)."""
    home_files: dict[str, str] = field(default_factory=dict)
    """Path relative to HOME -> text."""
    workspace_files: dict[str, str] = field(default_factory=dict)
    """Path relative to the workspace -> text. The verifier sees them too: prefer HOME."""
    stdin: str | None = None
    """Text on standard input; None = /dev/null."""
    visible: tuple[str, ...] = ()
    """Host paths that must be readable inside the sandbox at the same place (programs, interpreters)."""


@dataclass(frozen=True)
class Missing:
    """Something the program needs and this machine lacks."""

    what: str
    fix: str
    """A command or sentence that mends it."""

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


class Options(BaseModel):
    """Base of an adapter's options; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    arguments: list[str] = Field(default_factory=list)
    """Further command-line arguments of the program."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the program."""


@dataclass(frozen=True)
class About:
    """What a person should know of a program before training it; `docs/harnesses.md` is made from it."""

    program: str
    """Its maker's name for it."""
    dialects: tuple[str, ...]
    """Dialects of the proxy that it can speak, the one it speaks unless told otherwise first."""
    streams: bool
    key: str
    """How the key travels; the URL's prefix always does."""
    subagents: str
    """Its tool for sub-agents, and how their calls are told from their parent's."""
    traps: str = ""
    """What it does otherwise than one would think, in a sentence or two."""
    megabytes: int | None = None
    """Size when installed, without Node."""
    install_s: int | None = None
    """Seconds that its installation took."""
    first_request_s: float | None = None
    """Seconds from its start to its first request, on two shared cores."""


class Harness(ABC):
    """One agent program under training. Stateless but for its options."""

    Options: ClassVar[type[Options]] = Options
    about: ClassVar[About | None] = None

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = name, options

    def packages(self) -> tuple[Package, ...]:
        """The pinned packages that the program consists of, its interpreter first; empty when a person has to bring it."""
        return ()

    def version(self) -> str:
        """What is run, for the rollout's record: the packages and their versions, or the sha256 of the adapter's own file."""
        if packages := self.packages():
            return ", ".join(f"{package.name} {package.version}" for package in packages)
        if type(self).__module__.partition(".")[0] == "forge_ray":
            return f"forge-ray {__version__}"
        file = Path(inspect.getfile(type(self)))
        return f"{file.name} sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"

    def check(self) -> list[Missing]:
        """What is missing on this machine; empty when a rollout can start. Quick, without network."""
        fix = f"run {INSTALL} {shlex.quote(self.name)}"
        return [
            Missing(f"{package.name} {package.version} is not installed", fix) for package in self.packages() if not package.installed()
        ]

    def install(self) -> None:
        """Get what `check` misses. Raises `UserError` where that takes a person."""
        for package in self.packages():
            package.install()
        for missing in self.check():
            raise UserError(missing.what, where=f"harness {self.name}", fix=missing.fix)

    @abstractmethod
    def configure(self, launch: Launch) -> Command:
        """The command of one rollout."""

    def crashed(self, exit_code: int | None, log: str) -> str | None:
        """One line that says how the program crashed, or None when it ended on its own terms (be it in failure).

        `exit_code` is the shell's (128 + n for signal n); None when it was killed from outside. `log` is the end of stdout and stderr.
        """
        return None if exit_code in (0, None) else exit_text(exit_code, log)

    def no_answer(self, exit_code: int | None, log: str) -> str | None:
        """One line when the program says that its model API gave it no answer (refused, unreachable, broken), else None: that is a fault of
        the proxy then and not the program's. Arguments as for `crashed`."""
        return None

    def submitted(self, exit_code: int | None, log: str) -> bool:
        """True when the program says that the model has handed its work in by a tool call, which is its final answer then. Arguments as for
        `crashed`."""
        return False

    def visible(self) -> tuple[str, ...]:
        """The host paths of the packages, for `Command.visible`."""
        return tuple(dict.fromkeys(path for package in self.packages() for path in package.visible))


def exit_text(exit_code: int | None, log: str) -> str:
    """An exit code in words, with the last line of the log."""
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    what = {126: "could not be started", 127: "could not be found"}.get(exit_code or 0)
    what = what or (f"died of signal {exit_code - 128}" if exit_code and exit_code > 128 else f"ended with exit code {exit_code}")
    return f"{what}: {last[:200]}" if last else what


def json_lines(log: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines of a log, the last first."""
    found = []
    for line in reversed(log.splitlines()):
        if line.lstrip().startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
    return found


BUILT_IN = {
    "react": "React",
    "codex": "Codex",
    "claude_code": "ClaudeCode",
    "zeroclaw": "ZeroClaw",
    "openclaw": "OpenClaw",
    "qwen_code": "QwenCode",
    "gemini_cli": "GeminiCli",
    "opencode": "OpenCode",
    "mini_swe_agent": "MiniSweAgent",
    "kimi_code": "KimiCode",
}
"""Name (and module) -> class."""


def get(name: str, options: dict[str, Any] | None = None) -> Harness:
    """The adapter `name`: a built-in one, or `file.py:Class`. Raises `UserError` for an unknown name or option, or a file that fails."""
    where = f"harness {name}"
    kind = _built_in(name) if name in BUILT_IN else _own(name, where)
    try:
        parsed = kind.Options.model_validate(options or {})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UserError(f"unknown option {key}", where=where, fix=f"it has {', '.join(sorted(kind.Options.model_fields))}") from None
        raise UserError(f"option {key} = {first['input']!r} is refused: {first['msg']}", where=where, fix="correct the value") from None
    try:
        return kind(name, parsed)
    except Exception as error:  # a person's own class, of which `configure` may be missing
        raise UserError(f"{kind.__name__} cannot be made ({type(error).__name__}: {error})", where=where, fix="mend the file") from error


def _built_in(name: str) -> type[Harness]:
    return getattr(importlib.import_module(f"forge_ray.harnesses.{name}"), BUILT_IN[name])


def _own(name: str, where: str) -> type[Harness]:
    file, separator, attribute = name.rpartition(":")
    if not separator or not file.endswith(".py"):
        raise UserError("no such harness", where=where, fix=f"use one of {', '.join(BUILT_IN)}, or file.py:Class")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"no file {path}", where=where, fix="give the path relative to the config file")
    spec = importlib.util.spec_from_file_location(f"forge_ray_harness_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # true for every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic and dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported ({type(error).__name__}: {error})", where=where, fix="mend the file") from error
    kind = getattr(module, attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Harness)):
        raise UserError(f"{path} has no class {attribute} derived from forge_ray.harnesses.harness.Harness", where=where, fix="add it")
    return cast("type[Harness]", kind)
