"""`task.toml` of Harbor's task format as pydantic models, and its deprecated spellings.

Values are coerced loosely, as Harbor does ("60" is 60.0). Unknown keys are kept apart in `model_extra`, so that the loader can name them;
Harbor ignores them. Every key of format 1.4 is known here, whether or not anything of ours acts on it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

NetworkMode = Literal["public", "no-network", "allowlist"]
Seconds = Annotated[float, Field(gt=0)]
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
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
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


def modernise(tree: dict[str, Any]) -> list[str]:
    """Replace deprecated spellings in `tree`, in place; returns a note for each. Raises `ValueError` with the key for one that says nothing."""
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
