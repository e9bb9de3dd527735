"""The part of a Dockerfile that a sandbox without images can honour: the files it copies, its working directory, its variables.

The process sandbox runs on the host's own system, so `FROM` is only noted and whatever would change the system (`RUN`, a copy
to outside the working directory) is named as unsupported, never skipped in silence. What only matters to a container that starts by
itself (`CMD`, `ENTRYPOINT`, `EXPOSE`, `LABEL`, `STOPSIGNAL`, `HEALTHCHECK`, `MAINTAINER`) has no meaning where commands are run one
by one.
"""

from __future__ import annotations

import glob
import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from forge_ray.tasks.copying import copy_file, copy_tree

WORKDIR = "/workspace"
"""Where the workspace lies when the task names no working directory."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What `$PATH` stands for in a Dockerfile, and what every command in a sandbox has."""

_MEANINGLESS = frozenset({"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER", "SHELL"})
_VARIABLE = re.compile(r"\\(.)|\$(?:\{(\w+)(?:(:[-+])([^}]*))?\}|(\w+))")
_ARCHIVE = re.compile(r"\.(tar|tar\.gz|tgz|tar\.bz2|tbz2?|tar\.xz|txz)$")


@dataclass(frozen=True)
class Copy:
    """One file or directory of the task that belongs in the workspace."""

    source: Path
    """Absolute. A directory stands for its contents."""
    target: str
    """Relative to the workspace, `.` for the workspace itself."""
    mode: int | None = None
    """Permission bits for every copied file, from `--chmod`."""


@dataclass(frozen=True)
class Image:
    """What a Dockerfile means to a sandbox that has no images."""

    workdir: str = WORKDIR
    env: dict[str, str] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()
    unsupported: tuple[str, ...] = ()
    """What it asks for beyond that, one line each with its line number."""
    base: str | None = None
    """The image that it begins with, as it names it (`debian:bookworm-slim`, `name@sha256:…`): not run here. None: it names none."""


def parse_dockerfile(file: Path, workdir: str | None = None) -> Image:
    """Read `file`; its directory is the build context. `workdir` (from task.toml) wins over the last `WORKDIR`, as where commands run."""
    reader = _Reader(file.parent, file.name)
    for number, keyword, rest in _instructions(file.read_text(errors="replace")):
        reader.take(number, keyword, rest)
    if (file.parent / ".dockerignore").exists():
        reader.refuse(None, ".dockerignore")
    return reader.image(workdir)


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line number, KEYWORD, rest) of every instruction, continued lines joined and comments removed."""
    found: list[tuple[int, str, str]] = []
    start, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (joined and not line.strip()):
            continue
        start = start if joined else number
        stripped = line.rstrip()
        if stripped.endswith("\\"):
            joined += stripped[:-1] + " "
            continue
        keyword, _, rest = (joined + stripped).strip().partition(" ")
        joined = ""
        if keyword:
            found.append((start, keyword.upper(), rest.strip()))
    if joined.strip():
        keyword, _, rest = joined.strip().partition(" ")
        found.append((start, keyword.upper(), rest.strip()))
    return found


class _Reader:
    def __init__(self, context: Path, name: str) -> None:
        self.context, self.name = context.resolve(), name
        self.workdir: str | None = None
        self.env: dict[str, str] = {}
        self.copies: list[tuple[int, Path, str, int | None]] = []
        self.problems: list[str] = []
        self.base: str | None = None
        self.stages: dict[str, str] = {}
        """Name of a stage -> the image that it begins with."""

    def refuse(self, number: int | None, what: str) -> None:
        self.problems.append(f"{self.name}{f':{number}' if number else ''}: {what}")

    def take(self, number: int, keyword: str, rest: str) -> None:
        if "\0" in rest:
            self.refuse(number, f"{keyword} with a NUL character")
        elif "<<" in rest and keyword in ("RUN", "COPY", "ADD"):
            self.refuse(number, f"{keyword} with a here-document")
        elif keyword == "FROM":
            self.stage(rest)
        elif keyword == "WORKDIR":
            self.workdir = posixpath.normpath(posixpath.join(self.workdir or "/", self.expand(rest)))
        elif keyword == "ENV":
            self.variables(number, rest)
        elif keyword in ("COPY", "ADD"):
            self.copy(number, keyword, rest)
        elif keyword not in _MEANINGLESS:
            self.refuse(number, f"{keyword} {rest}"[:120])

    def stage(self, rest: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        if words:
            self.base = self.stages.get(words[0].lower(), words[0])
        if len(words) == 3 and words[1].lower() == "as":
            self.stages[words[2].lower()] = self.base or words[0]

    def expand(self, text: str) -> str:
        def one(match: re.Match[str]) -> str:
            escaped, braced, operator, word, plain = match.groups()
            if escaped is not None:
                return escaped if escaped == "$" else match[0]
            name = braced or plain
            value = self.env.get(name, PATH if name == "PATH" else "")
            if operator == ":-":
                return value or word
            return (word if value else "") if operator == ":+" else value

        return _VARIABLE.sub(one, text)

    def variables(self, number: int, rest: str) -> None:
        first, separator, value = rest.partition(" ")
        if "=" not in first:  # the old form, ENV NAME the whole rest
            if not separator:
                return self.refuse(number, f"ENV {rest}")
            self.env[first] = self.expand(value.strip())
            return None
        try:
            words = shlex.split(rest)
        except ValueError:
            return self.refuse(number, f"ENV {rest}")
        pairs = [word.partition("=") for word in words]
        if not all(key for key, _, _ in pairs):
            return self.refuse(number, f"ENV {rest}")
        self.env |= {key: self.expand(text) for key, _, text in pairs}
        return None

    def copy(self, number: int, keyword: str, rest: str) -> None:
        mode: int | None = None
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            rest = rest.lstrip()
            name, _, value = flag.partition("=")
            if name == "--chmod" and re.fullmatch(r"0?[0-7]{3}", value):
                mode = int(value, 8)
            elif name not in ("--chown", "--link"):  # every file of a sandbox has one owner
                return self.refuse(number, f"{keyword} {flag}")
        try:
            words = [str(word) for word in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)
        except (ValueError, RecursionError):
            return self.refuse(number, f"{keyword} {rest}")
        if len(words) < 2:
            return self.refuse(number, f"{keyword} {rest} (needs a source and a target)")
        *sources, target = map(self.expand, words)
        here = self.workdir or WORKDIR
        place = posixpath.normpath(posixpath.join(here, target))
        is_directory = target.endswith(("/", "/.")) or target in (".", "..") or place == here
        for source in sources:
            self.source(number, keyword, source, place, is_directory or len(sources) > 1, mode)
        return None

    def source(self, number: int, keyword: str, source: str, place: str, is_directory: bool, mode: int | None) -> None:
        if keyword == "ADD" and (re.match(r"(https?|git|ssh)://|git@", source) or _ARCHIVE.search(source)):
            return self.refuse(number, f"ADD {source} (only plain files and directories)")
        relative = posixpath.normpath(source.lstrip("/") or ".")
        pattern = str(self.context / relative)
        paths = [Path(path) for path in sorted(glob.glob(pattern))] if glob.has_magic(relative) else [Path(pattern)]
        if not paths:
            return self.refuse(number, f"{keyword} {source} (matches no file)")
        for path in paths:
            real = path.resolve()
            if real != self.context and self.context not in real.parents:
                self.refuse(number, f"{keyword} {source} (outside of environment/)")
            elif not real.exists():
                self.refuse(number, f"{keyword} {source} (no such file)")
            elif not real.is_dir() and not real.is_file():
                self.refuse(number, f"{keyword} {source} (no regular file)")
            elif real.is_dir():
                self.copies.append((number, real, place, mode))
            else:
                self.copies.append((number, real, posixpath.join(place, path.name) if is_directory else place, mode))
        return None

    def image(self, workdir: str | None) -> Image:
        final = posixpath.normpath(posixpath.join(self.workdir or "/", workdir)) if workdir else (self.workdir or WORKDIR)
        copies: list[Copy] = []
        for number, path, place, mode in self.copies:
            relative = posixpath.relpath(place, final)
            if relative == ".." or relative.startswith("../"):
                self.refuse(number, f"COPY to {place} (only below the working directory {final})")
            else:
                copies.append(Copy(path, relative, mode))
        return Image(final, dict(self.env), tuple(copies), tuple(self.problems), self.base)


def lay_out(image: Image, workspace: Path) -> None:
    """Copy the image's files into `workspace`. Links inside a copied directory stay links; a file gets the mode of its source."""
    for copy in image.copies:
        if copy.source.is_dir():
            copy_tree(copy.source, workspace / copy.target, copy.mode)
        else:
            copy_file(copy.source, workspace / copy.target, copy.mode)
