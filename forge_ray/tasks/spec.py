"""`task.toml` of Harbor's task format as pydantic models, and its deprecated spellings.

Values are coerced loosely, as Harbor does ("60" is 60.0). Unknown keys are kept apart in `model_extra`, so that the loader can name them;
Harbor ignores them. Every key of format 1.4 is known here, whether or not anything of ours acts on it.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from forge_ray.errors import UserError

NetworkMode = Literal["public", "no-network", "allowlist"]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Megabytes = Annotated[int, Field(gt=0, le=2**30)]
User = str | int

_SIZE = re.compile(r"(\d+)([KMG])")
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20}


class Table(BaseModel):
    """Base of every table: unknown keys end up in `model_extra`."""

    model_config = ConfigDict(extra="allow", frozen=True)


class TaskInfo(Table):
    """`[task]`"""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """`org/name`"""
    version: str | None = None
    description: str | None = None
    authors: list[Any] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _no_parent(cls, value: str) -> str:
        if ".." in value:
            raise ValueError("'..' is not allowed in a name")
        return value


class Network(Table):
    """The network keys that several tables share."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class Agent(Network):
    """`[agent]`"""

    timeout_sec: Seconds | None = None
    """Wall-clock limit of the harness, seconds; None = the run's."""
    user: User | None = None


class Collect(Table):
    command: str
    service: str | None = None
    timeout_sec: Seconds = 60
    user: User | None = None


class Verifier(Network):
    """`[verifier]`"""

    timeout_sec: Seconds | None = None
    """Wall-clock limit of test.sh, seconds; None = the run's."""
    reward: str | None = None
    """A reward function, `package.module:function` or `file.py:function` in the task's directory. Harbor ignores it."""
    env: dict[str, str] = {}
    user: User | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[Collect] = []

    @model_validator(mode="after")
    def _one_mode(self) -> Verifier:
        if self.environment is not None and self.environment_mode == "shared":
            raise ValueError("environment needs environment_mode = separate")
        return self


class Healthcheck(Table):
    command: str
    interval_sec: Seconds = 5
    timeout_sec: Seconds = 30
    start_period_sec: float = 0
    start_interval_sec: Seconds = 5
    retries: int = 3


class McpServer(Table):
    name: str
    transport: Literal["sse", "streamable-http", "stdio"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}


class Environment(Network):
    """`[environment]`"""

    build_timeout_sec: Seconds = 600
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    workdir: str | None = None
    env: dict[str, str] = {}
    skills_dir: str | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    healthcheck: Healthcheck | None = None
    mcp_servers: list[McpServer] = []


class Solution(Table):
    env: dict[str, str] = {}


class Step(Table):
    name: str
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[Any] = []


class TaskToml(Table):
    """The whole file."""

    schema_version: str = "1.4"
    source: str | None = None
    artifacts: list[Any] = []
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    metadata: dict[str, Any] = {}
    task: TaskInfo | None = None
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()
    steps: list[Step] = []


def read_regular(file: Path) -> bytes:
    """The content of a regular file. Raises `OSError`, also for a FIFO or a device: reading those may never end."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return opened.read()


def read_spec(file: Path) -> tuple[TaskToml, list[str]]:
    """The file, and a note for each unknown key and deprecated form. Raises `UserError`."""
    try:
        tree: dict[str, Any] = tomllib.loads(read_regular(file).decode())
    except FileNotFoundError:
        raise UserError("is missing", where=str(file), fix="an empty file will do") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"is not TOML ({error})", where=str(file), fix="correct it") from None
    except RecursionError:
        raise UserError("is nested too deeply", where=str(file), fix="write it flatter") from None
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(file)) from None
    try:
        notes = [f"{file}: {note}" for note in _modernise(tree)]
        spec = TaskToml.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        what = f"{key} is missing" if first["type"] == "missing" else f"{key} = {first['input']!r} is refused: {message}"
        raise UserError(f"{what}{more}", where=str(file), fix="correct it") from None
    except ValueError as error:
        raise UserError(str(error), where=str(file)) from None
    return spec, notes + [f"{file}: {line}" for line in _unknown(spec, "")]


def _unknown(model: BaseModel, prefix: str) -> list[str]:
    """A line for every key that no table of ours has."""
    lines = []
    for key in model.model_extra or {}:
        near = difflib.get_close_matches(key, type(model).model_fields, n=1, cutoff=0.5)
        elsewhere = [f"{table}.{key}" for table, names in _tables().items() if key in names] if not near else []
        hint = f"; did you mean {prefix}{near[0]}?" if near else f"; it belongs in {elsewhere[0]}" if elsewhere else ""
        lines.append(f"unknown key {prefix}{key} is ignored{hint}")
    for name in type(model).model_fields:
        value = getattr(model, name)
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, BaseModel):
                lines += _unknown(item, f"{prefix}{name}{f'[{index}]' if isinstance(value, list) else ''}.")
    return lines


def _tables() -> dict[str, set[str]]:
    tables: dict[str, set[str]] = {}
    for name, field in TaskToml.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                tables[name] = set(kind.model_fields)
    return tables


def _modernise(tree: dict[str, Any]) -> list[str]:
    """Replace deprecated spellings in `tree`, in place; returns a note for each.

    Raises `ValueError` with the key for one that says nothing.
    """
    notes: list[str] = []
    if "version" in tree:
        version = tree.pop("version")
        if "schema_version" not in tree:
            tree["schema_version"] = version
        notes.append("version is the old name of schema_version")
    environment = tree.get("environment")
    if not isinstance(environment, dict):
        return notes
    for old in ("memory", "storage"):
        if old not in environment:
            continue
        value, new = environment.pop(old), f"{old}_mb"
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f'environment.{old} = {value!r} is no size; write {new} = 2048 (or {old} = "2G")')
        megabytes = int(match[1]) * _KIB[match[2]] >> 10
        if new in environment:
            notes.append(f"environment.{old} is ignored, {new} = {environment[new]} wins")
        else:
            environment[new] = megabytes
            notes.append(f"environment.{old} = {value!r} is the old form of {new} = {megabytes}")
    if "allow_internet" in environment:
        allowed = environment.pop("allow_internet")
        if "network_mode" in environment or "allowed_hosts" in environment:
            notes.append("environment.allow_internet is ignored, network_mode wins")
        else:
            environment["network_mode"] = "public" if allowed else "no-network"
            notes.append(f"environment.allow_internet is the old form of network_mode = {environment['network_mode']}")
    return notes
