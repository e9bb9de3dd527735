"""Packages from PyPI, each in a virtual environment of its own on the Python that runs us.

The environment is renamed once it is whole, which its scripts do not survive (they name their interpreter by its path): a program is
started as a module (`python -m …`). Its interpreter is a link to the base Python, which a sandbox must see too: `visible`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from forge_ray.errors import UserError
from forge_ray.harnesses.install.package import Package


@dataclass(frozen=True)
class PythonPackage(Package):
    """One package of PyPI; `program` is the environment's interpreter."""

    program: str = "bin/python"
    also: tuple[str, ...] = field(default=())
    """Further requirements, such as a pin of a dependency that the package leaves open."""

    registry: ClassVar[str] = "PyPI"

    @property
    def visible(self) -> tuple[str, ...]:
        return (str(self.folder), sys.base_prefix)

    def make(self, folder: Path) -> None:
        # Nothing of the environment that we run in, or of a user's settings for it, may leak into this one.
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
        base, wanted = str(Path(sys.executable).resolve()), [f"{self.name}=={self.version}", *self.also]
        fix = "check the network and the index setting of pip or uv"
        if _works("uv", "--version"):
            self.run(["uv", "venv", "--quiet", "--allow-existing", "--python", base, str(folder)], environment, folder, fix)
            self.run(["uv", "pip", "install", "--quiet", "--python", str(folder / self.program), *wanted], environment, folder, fix)
        else:
            if not _works(base, "-c", "import ensurepip, venv"):
                version = ".".join(map(str, sys.version_info[:2]))
                fix = f"install uv, or run apt-get install python{version}-venv"
                raise UserError(f"neither uv nor the module ensurepip of {base} is there", where=self.name, fix=fix)
            self.run([base, "-m", "venv", str(folder)], environment, folder, fix)
            pip = [str(folder / self.program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            self.run([*pip, *wanted], environment, folder, fix)


def _works(*command: str) -> bool:
    """Whether a command runs: one that is on PATH may be a shim that does not."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return False
    return done.returncode == 0
