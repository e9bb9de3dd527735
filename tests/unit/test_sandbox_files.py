"""What a hostile harness leaves on disk: archived and removed, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forge_ray.sandboxes import archive, bubblewrap
from forge_ray.sandboxes.archive import archive_tree, restore_tree
from forge_ray.sandboxes.removal import remove_tree
from forge_ray.sandboxes.sandbox import SandboxError
from tests.sandbox_maker import Maker, needs_bubblewrap

ORDINARY = 54321
"""A user id that owns nothing."""

HOSTILE = r"""
mkdir -p ro/d; echo x > ro/d/f; chmod 555 ro/d ro; echo secret > s; chmod 000 s; mkfifo p; ln -s / root; ln -s loop loop
mkdir -p locked/in; echo y > locked/in/f; chmod 000 locked/in locked; : > "$(printf 'caf\351.txt')"; : > ' leading'; : > -- ; ln s hard
"""


@pytest.fixture(params=["as we are", "as an ordinary user"])
def user(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[Path], None]], None]]:
    """Runs a function of a fresh directory as that user, in a process of its own where that takes one."""
    root = Path(tempfile.mkdtemp(prefix="forge-ray-test-"))
    ordinary = request.param == "as an ordinary user"
    if ordinary and os.geteuid() != 0:
        pytest.skip("we are an ordinary user already")

    def run(work: Callable[[Path], None]) -> None:
        if not ordinary:
            return work(root)
        os.chown(root, ORDINARY, ORDINARY)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(ORDINARY)
                os.setuid(ORDINARY)
                work(root)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        return None

    yield run
    shutil.rmtree(root, ignore_errors=True)


def make_hostile(tree: Path) -> None:
    tree.mkdir()
    assert os.spawnlp(os.P_WAIT, "sh", "sh", "-ec", f"cd {tree}; {HOSTILE}") == 0


def members(file: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(file, encoding="utf-8", errors="surrogateescape") as tar:
        return {member.name: member for member in tar.getmembers()}


def test_a_hostile_tree_is_archived_whole_and_left_as_it_was(user: Callable[[Callable[[Path], None]], None]) -> None:
    def work(root: Path) -> None:
        tree = root / "tree"
        make_hostile(tree)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tree / "socket"))
        before = {name: (tree / name).lstat().st_mode for name in ("ro", "ro/d", "s", "locked", "p")}
        digest = archive_tree(tree, root / "archive")
        assert {name: (tree / name).lstat().st_mode for name in before} == before
        found = members(root / "archive" / f"{digest}.tar.gz")
        names = [" leading", "--", "caf\udce9.txt", "hard", "locked", "locked/in", "locked/in/f", "loop", "p", "ro", "ro/d", "ro/d/f"]
        assert sorted(found) == sorted([*names, "root", "s"])
        assert found["p"].isfifo() and found["root"].issym() and found["root"].linkname == "/" and found["loop"].linkname == "loop"
        assert found["s"].mode == 0 and found["s"].isreg() and found["ro"].mode == 0o555
        assert found["hard"].isreg() and found["hard"].size == 7
        assert {member.mtime for member in found.values()} == {0}
        assert {(member.uid, member.gid, member.uname) for member in found.values()} == {(0, 0, "")}
        with tarfile.open(root / "archive" / f"{digest}.tar.gz") as tar:
            content = tar.extractfile("locked/in/f")
            assert content is not None and content.read() == b"y\n"

    user(work)


def test_a_restored_archive_is_the_workspace_again(user: Callable[[Callable[[Path], None]], None]) -> None:
    def work(root: Path) -> None:
        make_hostile(root / "tree")
        store = root / "archive"
        digest = archive_tree(root / "tree", store)
        (root / "back").mkdir()
        restore_tree(store / f"{digest}.tar.gz", root / "back")
        assert archive_tree(root / "back", store) == digest
        assert b"caf\xe9.txt" in os.listdir(os.fsencode(root / "back"))
        assert os.readlink(root / "back" / "root") == "/" and (root / "back" / "p").is_fifo()
        remove_tree(root / "back")

    user(work)


@pytest.mark.parametrize("name", ["../escape", "/tmp/escape", "link/escape", "a/../../escape", "", "a//b"])
def test_an_archive_that_would_leave_the_workspace_is_refused(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "tree").mkdir()
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(SandboxError, match="cannot be restored"):
        restore_tree(tmp_path / "bad.tar.gz", tmp_path / "tree")
    assert list(outside.iterdir()) == [] and not Path("/tmp/escape").exists() and not (tmp_path / "escape").exists()


def test_an_archive_that_was_cut_or_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(os.urandom(50_000))
    digest = archive_tree(tmp_path / "tree", tmp_path)
    file = tmp_path / f"{digest}.tar.gz"
    whole = file.read_bytes()
    for content in (whole[:-30_000], b"", b"no archive"):
        (target := tmp_path / f"to{len(content)}").mkdir()
        file.write_bytes(content)
        with pytest.raises(SandboxError, match=file.name):
            restore_tree(file, target)
    file.unlink()
    with pytest.raises(SandboxError, match="No such file"):
        restore_tree(file, tmp_path / "to0")


def test_a_hostile_tree_is_removed_and_nothing_else(user: Callable[[Callable[[Path], None]], None]) -> None:
    def work(root: Path) -> None:
        (root / "outside").mkdir()
        (root / "outside" / "kept").write_text("k")
        tree = root / "tree"
        make_hostile(tree)
        os.symlink(root / "outside", tree / "link")
        os.symlink(root / "outside", root / "top")
        remove_tree(tree)
        remove_tree(tree)
        remove_tree(root / "top")
        assert sorted(os.listdir(root)) == ["outside"] and os.listdir(root / "outside") == ["kept"]

    user(work)


def test_depth_is_no_matter(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for name in ("tree", *["d" * 100] * 1200):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    digest = archive_tree(tmp_path / "tree", tmp_path / "archive")
    assert len(members(tmp_path / "archive" / f"{digest}.tar.gz")) == archive.MAX_DEPTH + 1
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_text("")

    def refuse(path: bytes) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(SandboxError, match=r"tree/f cannot be removed: Operation not permitted"):
        remove_tree(tmp_path / "tree")


def test_the_digest_names_the_content_alone(tmp_path: Path) -> None:
    for number in (1, 2):
        tree = tmp_path / f"tree{number}"
        (tree / "sub").mkdir(parents=True)
        for name in ("b", "a", "sub/c") if number == 1 else ("sub/c", "a", "b"):
            (tree / name).write_text(name)
            os.utime(tree / name, (number, number))
    store = tmp_path / "archive"
    first, second = (archive_tree(tmp_path / f"tree{number}", store) for number in (1, 2))
    assert first == second and os.listdir(store) == [f"{first}.tar.gz"]
    (tmp_path / "tree2" / "a").chmod(0o755)
    assert archive_tree(tmp_path / "tree2", store) != first
    (tmp_path / "empty").mkdir()
    archive_tree(tmp_path / "empty", store)
    assert len(os.listdir(store)) == 3


def test_what_cannot_be_archived_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    with open(tmp_path / "tree" / "sparse", "wb") as file:
        file.truncate(archive.MAX_BYTES + 1)
    with pytest.raises(SandboxError, match="more than 1024 MiB"):
        archive_tree(tmp_path / "tree", tmp_path / "archive")
    with pytest.raises(SandboxError, match="cannot be archived"):
        archive_tree(tmp_path / "nowhere", tmp_path / "archive")
    os.symlink("tree", tmp_path / "link")
    with pytest.raises(SandboxError, match="cannot be archived"):
        archive_tree(tmp_path / "link", tmp_path / "archive")
    assert os.listdir(tmp_path / "archive") == []


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
def test_the_same_slot_twice_after_a_hostile_harness(
    user: Callable[[Callable[[Path], None]], None], isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isolation == "bubblewrap":
        needs_bubblewrap()
    # An ordinary user may not reach the interpreter that runs us.
    monkeypatch.setattr("sys.executable", shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or "python3")

    async def rollout(maker: Maker) -> str:
        async with await maker.sandbox() as box:
            assert os.listdir(box.directory / "workspace") == []
            result = await box.run(["sh", "-ec", f"{HOSTILE}\nchmod 000 ~ ."], deadline_s=120)
            assert result.exit_code == 0, box.log_text()
            digest = await box.archive(maker.root / "archive")
            assert (await box.verify(timeout_s=120)).reward == 1.0
        assert maker.clean()
        return digest

    def work(root: Path) -> None:
        bubblewrap.probe.cache_clear()
        maker = Maker(root, "bubblewrap" if isolation == "bubblewrap" else "none")
        assert asyncio.run(rollout(maker)) == asyncio.run(rollout(maker))
        assert sorted(os.listdir(root)) == ["archive", "logs", "sandboxes", "task"]

    user(work)
