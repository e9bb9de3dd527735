"""A task: one directory in Harbor's format, loaded and validated.

    task.toml  instruction.md  environment/{Dockerfile,…}  tests/{test.sh,…}  [solution/solve.sh]

`load_task` refuses what is broken with one `UserError` that names file and key; what is merely odd (an unknown key, a deprecated
spelling) is a note. What is valid but cannot be given here is not an error of the task: `Task.unsupported` names it for a backend.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forge_ray.errors import UserError
from forge_ray.reference import parse
from forge_ray.tasks.image import Image, parse_dockerfile
from forge_ray.tasks.spec import TaskToml, read_regular, read_spec

TESTS_DIR, VERIFIER_DIR = "/tests", "/logs/verifier"
"""Where Harbor has a verifier's files and its results. `tests/test.sh` finds both also in the variables of these names."""

SHOWN = 3
"""Broken tasks that a message names."""
_TAKEN = frozenset(("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt", "nix", "proc", "dev", "sys", "run", "var"))
_TEMPLATE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
_DEFAULTED = re.compile(r"\$\{\w+:?-[^}]*\}")


@dataclass(frozen=True)
class Task:
    """A loaded task. Immutable and picklable; its files stay where they are."""

    directory: Path
    """Absolute."""
    name: str
    """`[task].name`, else the directory's name."""
    instruction: str
    """Text of instruction.md without leading canary lines."""
    spec: TaskToml
    image: Image
    """What environment/Dockerfile puts into the workspace."""
    env: dict[str, str]
    """Variables of harness and verifier: the Dockerfile's, then `[environment].env`."""
    verifier_env: dict[str, str]
    """Variables of the verifier, on top of `env`."""
    notes: tuple[str, ...] = ()
    """Unknown keys and deprecated forms, one line each that starts with the file."""

    @property
    def workdir(self) -> str:
        """The working directory inside a sandbox: where the workspace lies."""
        return self.image.workdir

    @property
    def tests(self) -> Path:
        return self.directory / "tests"

    @property
    def has_test(self) -> bool:
        """Whether there is a tests/test.sh: a task with a reward function needs none."""
        return (self.tests / "test.sh").is_file()

    @property
    def solution(self) -> Path | None:
        """solution/solve.sh, where there is one."""
        path = self.directory / "solution" / "solve.sh"
        return path if path.is_file() else None

    @property
    def memory_mb(self) -> int | None:
        return self.spec.environment.memory_mb

    @property
    def agent_timeout_s(self) -> float | None:
        """Wall-clock limit of the harness in seconds, where the task sets one."""
        return self.spec.agent.timeout_sec

    @property
    def verifier_timeout_s(self) -> float | None:
        """Wall-clock limit of the verifier in seconds, where the task sets one."""
        return self.spec.verifier.timeout_sec

    def unsupported(self, backend: str = "process", isolation: Literal["bubblewrap", "none"] = "bubblewrap") -> list[str]:
        """What this task asks for and `backend` cannot give, one line each; empty when it can run there.

        `isolation` is what the process backend has on this machine: without bubblewrap no absolute path of the task exists.
        """
        if backend != "process":
            raise ValueError(f"unknown backend {backend!r}")
        spec, where = self.spec, spec_wishes(self.spec)
        lines = [f"task.toml: {wish}" for wish in where]
        if (self.directory / "trajectory.json").exists():
            lines.append("trajectory.json (prior context)")
        lines += [f"environment/{line}" for line in self.image.unsupported]
        if (self.directory / "tests" / ".harborignore").exists():
            lines.append("tests/.harborignore")
        if spec.environment.docker_image is None and _compose(self.directory):
            lines.append("environment/docker-compose.yaml")
        if problem := workdir_problem(self.workdir):
            lines.append(f"working directory {self.workdir} ({problem})")
        if isolation == "none":
            lines += self._hard_coded()
        return lines

    def unenforced(self) -> list[str]:
        """Limits that the process backend accepts but does not enforce, one line each."""
        environment, file = self.spec.environment, self.directory / "task.toml"
        wanted = {"cpus": environment.cpus, "storage_mb": environment.storage_mb}
        return [f"{file}: environment.{key} = {value} is not enforced" for key, value in wanted.items() if value is not None]

    def _hard_coded(self) -> list[str]:
        """Absolute paths in the task's own texts that only a sandbox with its own file system has."""
        lines = []
        for name, paths in (
            ("instruction.md", (self.workdir,)),
            ("tests/test.sh", (TESTS_DIR, VERIFIER_DIR, self.workdir)),
        ):
            if name == "tests/test.sh" and not self.has_test:
                continue
            text = _DEFAULTED.sub("", (self.directory / name).read_text(errors="replace"))
            for path in paths:
                if re.search(rf"(?<![\w./$}}-]){re.escape(path)}(?![\w-])", text):
                    variable = {TESTS_DIR: "TESTS_DIR", VERIFIER_DIR: "VERIFIER_DIR"}.get(path, "WORKSPACE")
                    fix = "" if name == "instruction.md" else f", or ${{{variable}:-{path}}} in its place"
                    lines.append(f"{name} names {path} literally: needs bubblewrap{fix}")
        return lines


def workdir_problem(workdir: str) -> str | None:
    """Why a workspace cannot be mounted at `workdir`, or None. The places named here are the sandbox's own or the host system's."""
    if workdir == "/":
        return "the root directory"
    if workdir.split("/")[1] in _TAKEN:
        return "a place of the system"
    own = ("/tests", "/logs", "/solution", "/home/agent")
    if workdir in ("/tmp", "/home") or any(workdir == place or workdir.startswith(f"{place}/") for place in own):
        return "a place of the sandbox"
    return None


def spec_wishes(spec: TaskToml) -> list[str]:
    """Keys of task.toml that ask for something that no sandbox of ours gives yet."""
    environment, verifier, agent = spec.environment, spec.verifier, spec.agent
    wishes = {
        "steps": bool(spec.steps),
        "artifacts": bool(spec.artifacts),
        "agent.user": agent.user is not None,
        "verifier.user": verifier.user is not None,
        "verifier.environment_mode = separate": verifier.environment_mode == "separate" or verifier.environment is not None,
        "verifier.collect": bool(verifier.collect),
        f"environment.docker_image = {environment.docker_image}": environment.docker_image is not None,
        "environment.os = windows": environment.os == "windows",
        "environment.skills_dir": environment.skills_dir is not None,
        "environment.gpus": bool(environment.gpus or environment.gpu_types),
        "environment.tpu": environment.tpu is not None,
        "environment.healthcheck": environment.healthcheck is not None,
        "environment.mcp_servers": bool(environment.mcp_servers),
    }
    for name, table in (("environment", environment), ("agent", agent), ("verifier", verifier)):
        wishes[f"{name}.network_mode = {table.network_mode} (the network is the host's)"] = table.network_mode not in (None, "public")
    return [wish for wish, wanted in wishes.items() if wanted]


def load_task(directory: str | os.PathLike[str]) -> Task:
    """Load and validate one task directory. Raises `UserError` with one line: file, key, what to do."""
    try:
        return _load(Path(directory).resolve(), str(directory))
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a name with NUL, nesting without end
        problem = "is nested too deeply" if isinstance(error, RecursionError) else f"cannot be read ({error})"
        raise UserError(problem, where=str(directory), fix="mend the task") from None


def _load(root: Path, given: str) -> Task:
    if not root.is_dir():
        raise UserError("no such task directory", where=given, fix="give a directory with task.toml and instruction.md")
    file = root / "task.toml"
    spec, notes = read_spec(file)
    instruction = _instruction(root / "instruction.md")
    if spec.verifier.reward is not None:
        parse(spec.verifier.reward, root, f"{file}: verifier.reward")
    elif not spec.steps and not (root / "tests" / "test.sh").is_file():
        raise UserError("is missing", where=str(root / "tests" / "test.sh"), fix="a task needs a verifier, or a reward function")
    _check_links(root)
    image = _image(root, spec)
    if (problem := _unusable_path(image.workdir)) is not None:
        raise UserError(f"the working directory {problem}", where=str(file), fix="choose a plain absolute path")
    return Task(
        directory=root,
        name=spec.task.name if spec.task else root.name,
        instruction=instruction,
        spec=spec,
        image=image,
        env=image.env | _resolve(spec.environment.env, f"{file}: environment.env"),
        verifier_env=_resolve(spec.verifier.env, f"{file}: verifier.env"),
        notes=tuple(notes),
    )


def load_tasks(directory: str | os.PathLike[str]) -> list[Task]:
    """Every task in `directory`, sorted by folder; files and hidden folders are no tasks.

    Raises one `UserError` that names all broken ones.
    """
    root = Path(directory)
    if (root / "task.toml").is_file():
        raise UserError("is itself a task", where=str(root), fix="name the folder that it lies in")
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(root), fix="give a directory of task directories") from None
    tasks: list[Task] = []
    problems: list[str] = []
    for folder in folders:
        try:
            tasks.append(load_task(folder))
        except UserError as error:
            problems.append(str(error).replace(f"{root.resolve()}{os.sep}", ""))
    if problems:
        more = f" | and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        said = f"{' | '.join(problems[:SHOWN])}{more}"
        raise UserError(f"{len(problems)} of {len(folders)} tasks cannot be loaded: {said}", where=str(root))
    if not tasks:
        raise UserError("holds no task", where=str(root), fix="each task is a directory with task.toml and instruction.md")
    by_name: dict[str, Task] = {}
    for task in tasks:
        if (other := by_name.setdefault(task.name, task)) is not task:
            where = f"{other.directory.name} and {task.directory.name}"
            raise UserError(f"{where} have the same name {task.name}", where=str(root), fix="each task needs a name of its own")
    return tasks


def _instruction(file: Path) -> str:
    try:
        text = read_regular(file).decode()
    except FileNotFoundError:
        raise UserError("is missing", where=str(file), fix="write what the agent is to do") from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 ({error.reason} at byte {error.start})", where=str(file), fix="save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror or error})", where=str(file)) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        raise UserError("has a NUL character in it, which no program can be given", where=str(file), fix="remove it")
    lines = text.splitlines(keepends=True)
    first = 0
    while first < len(lines) and re.match(r"\s*(<!--|#).*canary", lines[first], re.IGNORECASE):
        first += 1
    while first and first < len(lines) and not lines[first].strip():
        first += 1
    text = "".join(lines[first:])
    if not text.strip():
        raise UserError("is empty", where=str(file), fix="write what the agent is to do")
    return text


def _unusable_path(path: str) -> str | None:
    """Why no directory can have this path; None if one can."""
    if "\0" in path:
        return "has a NUL character in it"
    if len(os.fsencode(path)) > 1024 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
        return f"{path[:40]}… is too long for a path"
    return None


def _compose(root: Path) -> bool:
    return any((root / "environment" / name).is_file() for name in ("docker-compose.yaml", "docker-compose.yml"))


def _image(root: Path, spec: TaskToml) -> Image:
    dockerfile = root / "environment" / "Dockerfile"
    if dockerfile.is_file():
        return parse_dockerfile(dockerfile, spec.environment.workdir)
    if spec.environment.docker_image is None and not _compose(root):
        raise UserError("is missing", where=str(dockerfile), fix="add it, or environment.docker_image in task.toml")
    return Image(workdir=os.path.normpath(os.path.join("/", spec.environment.workdir))) if spec.environment.workdir else Image()


def _check_links(root: Path) -> None:
    """No link in tests/ or solution/ may lead out of the task."""
    for part in ("tests", "solution"):
        for folder, names, files in os.walk(root / part):
            for name in (*names, *files):
                path = Path(folder, name)
                if not path.is_symlink():
                    continue
                try:
                    inside = path.resolve().is_relative_to(root)
                except (OSError, RuntimeError):
                    raise UserError("is a link that leads nowhere", where=str(path), fix="remove it") from None
                if not inside:
                    raise UserError("is a link that leaves the task", where=str(path), fix="copy what it points to")


def _resolve(env: dict[str, str], where: str) -> dict[str, str]:
    """Replace values that are wholly `${VAR}` or `${VAR:-default}` by the host's variables; set but empty counts as set."""
    resolved = {}
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            said = f"{key!r} = {value[:40]!r}"
            raise UserError(f"{said} is no environment variable (no '=' in a name, no NUL)", where=where, fix="correct it")
        match = _TEMPLATE.fullmatch(value)
        if match is None:
            resolved[key] = value
        elif match[1] in os.environ:
            resolved[key] = os.environ[match[1]]
        elif match[2] is not None:
            resolved[key] = match[2]
        else:
            raise UserError(f"{match[1]} is not set", where=f"{where}.{key}", fix=f"export {match[1]}, or write ${{{match[1]}:-default}}")
    return resolved
