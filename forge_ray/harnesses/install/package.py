"""What a program from a registry is: a name, one version, and a folder of its own below one cache directory outside any checkout.

The cache is `$FORGE_RAY_CACHE`, else `~/.cache/forge-ray/harnesses`; a folder is `<package>-<version>`.

Invariants: a folder is made under another name and renamed when it is whole, below a lock, so an interrupted or doubled installation
leaves nothing half-made; one that is there is never touched again. Nothing outside the cache is changed, ForgeRay's own environment
least of all. What is not named here may be newer next time (a package's own dependencies), what is named never is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from forge_ray.errors import UserError

INSTALL = "python -m forge_ray.harnesses.install"
"""The command that mends a missing program, for messages: append the harness's name."""


def cache_directory() -> Path:
    """`$FORGE_RAY_CACHE`, else `~/.cache/forge-ray/harnesses`."""
    return Path(os.environ.get("FORGE_RAY_CACHE") or Path.home() / ".cache" / "forge-ray" / "harnesses")


@dataclass(frozen=True)
class Package(ABC):
    """One package at one version."""

    name: str
    """Name in its registry."""
    version: str
    program: str
    """The executable, below the folder. It is looked for: npm leaves out an optional package that it cannot get without a word."""

    registry: ClassVar[str]
    """Where it comes from, in a word."""

    @property
    def folder(self) -> Path:
        """Where it lies when installed."""
        return cache_directory() / f"{self.name.lstrip('@').replace('/', '-')}-{self.version}"

    @property
    def executable(self) -> Path:
        """The program's absolute path, there or not."""
        return self.folder / self.program

    @property
    def visible(self) -> tuple[str, ...]:
        """Host paths that a sandbox must show for the program to start."""
        return (str(self.folder),)

    def installed(self) -> bool:
        """True when the whole package is there."""
        return os.access(self.executable, os.X_OK)

    def install(self) -> Path:
        """Install it unless it is there; returns its folder. Raises `UserError` with the fix."""
        if self.installed():
            return self.folder
        self.prepare()
        with _lock(self):
            if self.installed():  # somebody else was faster
                return self.folder
            scratch = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=f".{self.folder.name}."))
            try:
                self.make(scratch)
                scratch.chmod(0o755)
                if self.folder.exists():  # left by another way of installing, or broken by hand
                    shutil.rmtree(self.folder)
                scratch.rename(self.folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        if not self.installed():
            fix = "check that the registry has the package for this platform"
            raise UserError(f"{self.registry} left no {self.program}", where=f"{self.name}@{self.version}", fix=fix)
        return self.folder

    def prepare(self) -> None:  # noqa: B027  (most need nothing)
        """Get or find what the installation itself needs. Raises `UserError` that names what is missing."""

    @abstractmethod
    def make(self, folder: Path) -> None:
        """Install into `folder`, which is empty and will be renamed. Raises `UserError`."""

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, fix: str) -> None:
        """Run a registry's client quietly. Raises `UserError` with its first error lines."""
        done = subprocess.run(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            words = " / ".join(([line for line in lines if "error" in line.lower()] or lines[-3:] or ["no message"])[:3])
            what = Path(command[0]).name
            raise UserError(f"{what} failed with code {done.returncode}: {words}", where=f"{self.name}@{self.version}", fix=fix)


@contextmanager
def _lock(package: Package) -> Iterator[None]:
    directory = package.folder.parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / f".{package.folder.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot be written ({error})", where=str(directory), fix="set FORGE_RAY_CACHE to a writable directory") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
