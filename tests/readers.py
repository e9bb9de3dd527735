"""Environments of other libraries that read our exports, apart from ours: `python -m tests.readers` makes them, in seconds.

They lie in `~/.cache/forge-ray/readers/<name>-<version>`. TRL and veRL see the packages of our own environment behind theirs (torch,
transformers, pyarrow); Harbor, whose bounds exclude vLLM's, stands alone and needs Python 3.12.
"""

from __future__ import annotations

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
        """Its interpreter. Skips the test where it is not installed; fails it with CI=true."""
        path = self.folder / "bin" / "python"
        if not path.exists():
            reason = f"{self.name} is not installed: python -m tests.readers"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        return path

    def run(self, script: Path, *arguments: str | Path) -> str:
        """What `script` prints in the environment."""
        environment = {
            **os.environ,
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
        scratch = self.folder.with_name(f".{self.folder.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        base = _new_python() if self.alone else Path(sys.executable)
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


def _new_python() -> Path:
    """A Python of at least 3.12."""
    known = [
        sys.executable,
        *(f"python3.{minor}" for minor in (12, 13, 14)),
        *map(str, Path.home().glob(".pyenv/versions/3.1[2-4]*/bin/python")),
    ]
    for candidate in known:
        found = shutil.which(candidate)
        check = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
        if found and subprocess.run([found, "-c", check], capture_output=True).returncode == 0:
            return Path(found)
    raise SystemExit("harbor needs Python 3.12 or newer: install python3.12 and python3.12-venv")


if __name__ == "__main__":
    for reader in READERS:
        reader.install()
        print(f"{reader.name}: {reader.folder}")
