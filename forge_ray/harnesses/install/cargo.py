"""Packages from crates.io, compiled on this machine by `cargo install --locked`: minutes of all cores, once.

The Rust that is used is the first that is new enough of: the one on PATH (which obeys `RUSTUP_TOOLCHAIN`), then rustup's toolchains,
stable ones first. Nothing is installed for it: which Rust a machine has is its owner's business. The build is one for size of the build,
not for speed of the program, which waits for a model nearly all of its time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from forge_ray.errors import UserError
from forge_ray.harnesses.install.package import Package

PROFILE = {
    "CARGO_PROFILE_RELEASE_LTO": "off",
    "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
    "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1",
    "CARGO_PROFILE_RELEASE_DEBUG": "0",
    "CARGO_PROFILE_RELEASE_STRIP": "symbols",
}


@dataclass(frozen=True)
class CargoPackage(Package):
    """One crate with a program."""

    features: tuple[str, ...] = field(default=())
    """Features beside which none is built."""
    rust: tuple[int, int] = (1, 85)
    """Oldest Rust that compiles it."""

    registry: ClassVar[str] = "cargo"

    def prepare(self) -> None:
        self._cargo()

    def make(self, folder: Path) -> None:
        command = [*self._cargo(), "install", "--locked", f"{self.name}@{self.version}", "--root", str(folder)]
        command += ["--no-default-features", *(["--features", ",".join(self.features)] if self.features else [])]
        fix = "check the network and the linker (Debian, Ubuntu: apt-get install build-essential pkg-config libssl-dev)"
        self.run(command, {**os.environ, **PROFILE}, folder, fix)

    def _cargo(self) -> list[str]:
        """The command of a cargo whose Rust is new enough. Raises `UserError`."""
        wanted = ".".join(map(str, self.rust))
        found = []
        for prefix in _toolchains():
            version = _rustc(prefix)
            if version is not None and version >= self.rust:
                return [*prefix, "cargo"]
            if version is not None:
                found.append(".".join(map(str, version)))
        has = f"found {', '.join(found)}" if found else "found none"
        fix = "install a newer one (rustup toolchain install stable, or nightly) and run again"
        raise UserError(f"Rust {wanted} or newer is needed, {has}", where=f"{self.name}@{self.version}", fix=fix)


def _toolchains() -> Iterator[list[str]]:
    """Prefixes of `rustc` and `cargo`: none, then `rustup run TOOLCHAIN`."""
    yield []
    if shutil.which("rustup"):
        listed = subprocess.run(["rustup", "toolchain", "list"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        names = [line.split()[0] for line in listed.stdout.splitlines() if "-" in line]
        for name in sorted(names, key=lambda name: not name.startswith("stable")):
            yield ["rustup", "run", name]


def _rustc(prefix: list[str]) -> tuple[int, int] | None:
    """Version of the Rust behind `prefix`, None where it does not run."""
    try:
        done = subprocess.run([*prefix, "rustc", "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError:
        return None
    match = re.match(r"rustc (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match and done.returncode == 0 else None
