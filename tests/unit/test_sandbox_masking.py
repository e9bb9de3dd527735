"""What root could still do in a sandbox without capabilities: tried with the real bubblewrap."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_ray.sandboxes import bubblewrap, masking
from tests.sandbox_maker import needs_bubblewrap


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    needs_bubblewrap()
    caches = (bubblewrap.probe, bubblewrap._system, masking._private)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def inside(folder: Path, script: str) -> list[str]:
    options = bubblewrap.arguments({str(folder): "/workspace"}, shm=str(folder), cwd="/workspace", visible=())
    done = subprocess.run([*bubblewrap.probe(), *options, "sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.stdout.decode().split()


def test_no_switch_of_the_kernel_can_be_opened_for_writing(tmp_path: Path) -> None:
    # Whatever this kernel has, not only what we know by name; a process's own entries are its own.
    tried = 'for file in $(find /proc -path "/proc/[0-9]*" -prune -o -type f -print 2>/dev/null); do'
    opened = inside(tmp_path, f"{tried} echo tried; (: >> $file) 2>/dev/null && echo $file; done")
    assert opened.count("tried") > 500 and [line for line in opened if line != "tried"] == []


def test_the_systems_secrets_cannot_be_read_and_the_rest_can(tmp_path: Path) -> None:
    secret = [path for path in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssl/private") if os.path.exists(path)]
    tried = " ".join([*secret, "/etc/passwd", "/etc/ssl/certs"])
    read = inside(tmp_path, f"for file in {tried}; do cat $file/* $file 2>/dev/null | head -c1 | grep -q . && echo $file; done")
    assert read == [path for path in ("/etc/passwd", "/etc/ssl/certs") if os.path.exists(path)]


def test_a_secret_that_came_later_is_covered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "etc"
    (tree / "keys").mkdir(parents=True)
    (tree / "plain").write_text("x")
    monkeypatch.setattr(masking, "SECRET_TREES", (str(tree),))
    os.utime(tree, (0, 0))  # what follows may come within one tick of the file system's clock
    assert masking.secrets() == []
    (tree / "keys").chmod(0o711)
    for name in ("password", "keys/private"):
        (tree / name).write_text("x")
        (tree / name).chmod(0o600)
    (tree / "closed").mkdir(mode=0o700)
    (tree / "link").symlink_to("password")
    covered = masking.secrets()
    assert [path for path in covered if path.startswith(str(tmp_path))] == [
        *(f"{tree}/closed",) * 2, f"{tree}/password", f"{tree}/keys/private",
    ]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write sysctls")
def test_isolation_that_leaves_the_kernels_switches_open_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "kernel", list)
    with pytest.raises(bubblewrap.Unavailable, match="/proc/sys/kernel/core_pattern can be written"):
        bubblewrap.probe()
