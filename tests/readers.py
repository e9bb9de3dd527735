"""Environments of other libraries that read our exports, apart from ours: `python -m tests.readers` makes them, in seconds.

They lie in `~/.cache/forge-ray/readers/<name>-<version>`. TRL and veRL see the packages of our own environment behind theirs (torch,
transformers, pyarrow); Harbor, whose bounds exclude vLLM's, stands alone and needs Python 3.12.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Reader:
    """One environment. `packages` are installed without their dependencies."""

    name: str
    packages: tuple[str, ...]
    alone: bool = False

    @property
    def folder(self) -> Path:
        cache = Path(os.environ.get("FORGE_RAY_READERS") or Path.home() / ".cache" / "forge-ray" / "readers")
        return cache / f"{self.packages[0].replace('==', '-')}-{sys.version_info[0]}.{sys.version_info[1]}"

    def python(self) -> Path:
        """Its interpreter. Skips the test where it is not installed; fails it with CI=true, unless the machine has no Python for it."""
        path = self.folder / "bin" / "python"
        if not path.exists():
            if self.alone and _new_python() is None:
                pytest.skip(f"{self.name} needs Python 3.12, which this machine has not")
            reason = f"{self.name} is not installed: python -m tests.readers"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        return path

    def run(self, script: Path, *arguments: str | Path) -> str:
        """What `script` prints in the environment."""
        # A learner of an earlier test may have said which rank of a group this process is.
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        command = [str(self.python()), "-W", "ignore", str(script), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stdout

    def install(self) -> None:
        if (self.folder / "bin" / "python").exists():
            return
        base = _new_python() if self.alone else Path(sys.executable)
        if base is None:
            print(
                f"{self.name} needs Python 3.12 or newer with venv, and is left out: install python3.12 and python3.12-venv",
                file=sys.stderr,
            )
            return
        scratch = self.folder.with_name(f".{self.folder.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        # `venv`, not uv's: without uv `pip` has to be in it.
        subprocess.run([str(base), "-m", "venv", *(["--without-pip"] if _uv() else []), str(scratch)], check=True)
        if not self.alone:
            (site,) = scratch.glob("lib/python3.*/site-packages")
            (site / "base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        python = str(scratch / "bin" / "python")
        uv = _uv()
        pip = [uv, "pip", "install", "--quiet", "--python", python] if uv else [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", *self.packages], check=True)
        scratch.rename(self.folder)


_DATASETS = ("datasets==5.2.0", "dill<0.4.2", "multiprocess<0.70.20", "xxhash")
HARBOR = Reader(
    "harbor",
    ("harbor==0.26.0", "pydantic==2.14.4", "pydantic-core", "typing-extensions", "annotated-types", "typing-inspection", "toml", "pathspec",
     "shortuuid"),
    alone=True,
)  # fmt: skip
TRL = Reader("trl", ("trl==1.16.0", "accelerate==1.15.0", *_DATASETS))
VERL = Reader(
    "verl",
    ("verl==0.9.1", "tensordict==0.10.0", "codetiming", "hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.3", "torchdata", "orjson",
     "importlib_metadata", "zipp", "pyvers", *_DATASETS),
)  # fmt: skip
READERS = (HARBOR, TRL, VERL)


def _uv() -> str | None:
    """uv, on the PATH or where `make env` has put it; a command may be a shim that does not work."""
    for candidate in ("uv", ".tools/uv/bin/uv"):
        if (found := shutil.which(candidate)) and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    return None


@functools.cache
def _new_python() -> Path | None:
    """A Python of at least 3.12."""
    # pyenv's shims are on the PATH and run only what is chosen; the programs themselves always do.
    pyenv = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip() if shutil.which("pyenv") else ""
    roots = {Path(root) for root in (pyenv, os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv") if root}
    known = [sys.executable, *(f"python3.{minor}" for minor in (12, 13, 14))]
    known += [str(python) for root in roots for python in sorted(root.glob("versions/3.1[2-4]*/bin/python"))]
    for candidate in known:
        found = shutil.which(candidate)
        check = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
        if found and subprocess.run([found, "-c", check], capture_output=True).returncode == 0:
            return Path(found)
    return None


if __name__ == "__main__":
    for reader in READERS:
        reader.install()
        print(f"{reader.name}: {reader.folder}")
