"""Installers: what they run, what they leave behind, what they say. The registries' clients are real programs that a test writes."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forge_ray.errors import UserError
from forge_ray.harnesses.install.__main__ import main as install
from forge_ray.harnesses.install.cargo import CargoPackage
from forge_ray.harnesses.install.package import Package, cache_directory
from forge_ray.harnesses.install.python import PythonPackage

CRATE = CargoPackage("some-crate", "1.2.3", "bin/some", features=("one", "two"), rust=(1, 96))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH, and an empty cache."""
    monkeypatch.setenv("FORGE_RAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def write(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def left() -> list[str]:
    """What the cache holds but for locks."""
    return sorted(path.name for path in cache_directory().iterdir() if not path.name.endswith(".lock"))


RUSTUP = """case "$1" in
toolchain) printf "stable-x86_64 (active)\\nnightly-x86_64\\n1.95.0-x86_64\\n";;
run) shift; RUST="$1" exec "$2" "$3" "$4";;
esac"""
RUSTC = 'case "$RUST" in nightly*) echo "rustc 1.97.0-nightly (4d1 2026-05-15)";; *) echo "rustc 1.95.0 (f8c 2026-04-14)";; esac'


def test_the_first_rust_that_is_new_enough(tools: Path) -> None:
    write(tools, "rustc", RUSTC)
    write(tools, "rustup", RUSTUP)
    assert CRATE._cargo() == ["rustup", "run", "nightly-x86_64", "cargo"]
    assert replace(CRATE, rust=(1, 95))._cargo() == ["cargo"]
    with pytest.raises(UserError) as error:
        replace(CRATE, rust=(1, 98)).install()
    assert "Rust 1.98 or newer is needed, found 1.95, 1.95, 1.97, 1.95" in str(error.value) and "rustup toolchain install" in str(
        error.value
    )
    assert not cache_directory().exists()


def test_no_rust_at_all(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(UserError, match=r"Rust 1\.96 or newer is needed, found none; install"):
        CRATE.install()


def test_a_crate_is_built_into_the_cache(tools: Path, tmp_path: Path) -> None:
    write(tools, "rustc", "echo 'rustc 1.96.1 (0 2026-06-01)'")
    write(tools, "cargo", f'echo "$@" "$CARGO_PROFILE_RELEASE_OPT_LEVEL" > {tmp_path}/args\nmkdir "$5/bin" && cp /bin/true "$5/bin/some"')
    assert CRATE.install() == cache_directory() / "some-crate-1.2.3"
    words = (tmp_path / "args").read_text().split()
    assert words[:4] == ["install", "--locked", "some-crate@1.2.3", "--root"]
    assert words[5:] == ["--no-default-features", "--features", "one,two", "1"]
    assert left() == ["some-crate-1.2.3"] and CRATE.installed()
    assert stat.S_IMODE(CRATE.folder.stat().st_mode) == 0o755  # another user's rollouts may run it
    write(tools, "cargo", "exit 1")
    assert CRATE.install() == CRATE.folder  # what is there is not built again


def test_a_build_that_fails_leaves_nothing_and_says_why(tools: Path) -> None:
    write(tools, "rustc", "echo 'rustc 1.96.1 (0 2026-06-01)'")
    write(tools, "cargo", 'mkdir "$5/bin"\necho "   Compiling x" >&2\necho "error: linker cc not found" >&2\nexit 101')
    with pytest.raises(UserError) as error:
        CRATE.install()
    assert "code 101: error: linker cc not found" in str(error.value) and left() == []


def test_a_package_without_its_program_is_refused(tools: Path) -> None:
    write(tools, "rustc", "echo 'rustc 1.96.1 (0 2026-06-01)'")
    write(tools, "cargo", "exit 0")
    with pytest.raises(UserError, match="cargo left no bin/some"):
        CRATE.install()


def test_python_packages_get_an_environment_of_their_own(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    venv = f'for last; do :; done; mkdir "$last/bin"; ln -s "{Path(sys.executable).resolve()}" "$last/bin/python"'
    write(tools, "uv", f'echo "$@ [$VIRTUAL_ENV$PYTHONPATH]" >> {log}\nif [ "$1" = venv ]; then {venv}; fi')
    monkeypatch.setenv("VIRTUAL_ENV", "/the/project")
    monkeypatch.setenv("PYTHONPATH", "/the/project/lib")
    package = PythonPackage("some-agent", "2.0", also=("dependency==1.1",))
    package.install()
    version, made, pip = log.read_text().splitlines()
    assert version.startswith("--version")
    assert made.startswith("venv ") and str(Path(sys.executable).resolve()) in made and made.endswith("[]")
    assert pip.endswith("some-agent==2.0 dependency==1.1 []") and str(package.folder.parent) in pip
    assert os.access(package.executable, os.X_OK) and left() == ["some-agent-2.0"]
    assert package.visible == (str(package.folder), sys.base_prefix)


def test_python_packages_without_uv(tools: Path) -> None:
    """A real virtual environment by the standard library; the index is one that has nothing."""
    write(tools, "uv", "exit 127")  # a shim of a version manager, without the program
    package = PythonPackage("no-such-agent", "1.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(UserError, match=r"No matching distribution found for no-such-agent==1\.0"):
            package.install()
    assert left() == []


def test_names_of_the_command_line(tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install(["reakt"]) == 2
    assert "no such harness" in capsys.readouterr().err
    assert install(["react"]) == 0
    assert capsys.readouterr().out == "react: nothing to install\n"
    write(tools, "rustc", "echo 'rustc 1.96.1 (0 2026-06-01)'")
    write(tools, "cargo", 'mkdir "$5/bin" && cp /bin/true "$5/bin/some"')
    (tmp_path / "mine.py").write_text(
        "from forge_ray.harnesses.harness import Command, Harness\n"
        "from forge_ray.harnesses.install.cargo import CargoPackage\n"
        "class Mine(Harness):\n"
        "    def packages(self):\n"
        "        return (CargoPackage('some-crate', '1.2.3', 'bin/some'),)\n"
        "    def configure(self, launch):\n"
        "        return Command(argv=('some',))\n"
    )
    name = f"{tmp_path}/mine.py:Mine"
    assert install([name]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{name}: getting some-crate 1.2.3 from cargo" and second.endswith("/cache/some-crate-1.2.3")
    assert install([name]) == 0
    assert "getting" not in capsys.readouterr().out


def test_folders_of_all_packages_differ(tools: Path) -> None:
    from forge_ray.harnesses import harness

    packages: set[Package] = {package for name in harness.BUILT_IN for package in harness.get(name).packages()}
    assert len({package.folder for package in packages}) == len(packages)
    assert all(package.folder.parent == cache_directory() for package in packages)
