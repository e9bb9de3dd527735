"""The process sandbox, with and without bubblewrap: real commands meet what they should, and nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from forge_ray.config import Sandbox as SandboxConfig
from forge_ray.errors import UserError
from forge_ray.sandboxes import bubblewrap
from forge_ray.sandboxes.process import ProcessBackend, ProcessSandbox
from forge_ray.sandboxes.sandbox import Sandbox, SandboxBackend, SandboxError
from forge_ray.tasks.task import load_task
from tests.sandbox_maker import LONG, Maker
from tests.task_maker import ALWAYS_ONE, make_task


async def test_what_a_command_meets(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "s3cret")
    maker.task(environment={"in.txt": "hello\n"}, dockerfile="FROM x\nWORKDIR /app\nCOPY in.txt .\nENV FROM_TASK=1\n")
    async with await maker.sandbox() as box:
        await box.put({".config/agent.toml": "x = 1\n", "bin/tool": b"\x00"}, to="home")
        await box.put({"notes/a.md": "a"}, to="workspace")
        files = "cat in.txt ~/.config/agent.toml notes/a.md; echo; wc -c < ~/bin/tool; cat"
        script = f'pwd; echo "$HOME"; {files}; env; touch "$TMPDIR/t"; exit 7'
        result = await box.run(["sh", "-c", script], env={"KEY": "v"}, deadline_s=LONG)
        lines = box.log_text().splitlines()
        assert lines[:6] == [box.workspace, box.home, "hello", "x = 1", "a", "1"]
        assert "KEY=v" in lines and "FROM_TASK=1" in lines and "HOST_SECRET" not in box.log_text()
        assert (result.exit_code, result.signal, result.limit) == (7, None, None)
        assert result.log == maker.logs / "harness.log" and result.log_bytes == result.log.stat().st_size
        assert 0 < result.cpu_seconds < 60 and 0 < result.seconds < LONG and "exit code 7" in result.detail
        if maker.isolation == "bubblewrap":
            assert (box.workspace, box.home) == ("/app", "/home/agent") and str(maker.root) not in box.log_text()
        again = await box.run(["cat"], stdin="from stdin", log="second", deadline_s=LONG)
        assert again.exit_code == 0 and box.log_text("second") == "from stdin"
    assert maker.clean()


async def test_signals_and_programs_that_do_not_start(maker: Maker) -> None:
    async with await maker.sandbox() as box:
        result = await box.run(["sh", "-c", "kill -SEGV $$"], deadline_s=LONG)
        assert (result.exit_code, result.signal) == (128 + signal.SIGSEGV, signal.SIGSEGV)
        assert (await box.run(["no-such-program"], deadline_s=LONG)).exit_code == 127
        await box.put({"plain": "echo from a script without a first line"}, to="workspace", mode=0o755)
        assert (await box.run(["./plain"], deadline_s=LONG)).exit_code == 0
        assert "without a first line" in box.log_text()
        with pytest.raises(SandboxError, match="no/such/place"):
            await box.run(["true"], cwd="/no/such/place", deadline_s=LONG)
        with pytest.raises(SandboxError, match="/no/such/tool"):
            await box.run(["true"], visible=["/no/such/tool"], deadline_s=LONG)


async def test_bubblewrap_hides_the_host(wrapped: Maker) -> None:
    (wrapped.root / "shown").mkdir()
    (wrapped.root / "shown" / "program").write_text("#!/bin/sh\necho shown\n")
    (wrapped.root / "shown" / "program").chmod(0o755)
    async with await wrapped.sandbox() as box, await wrapped.sandbox("other") as other:
        attempts = [
            f"cat {wrapped.directory}/tests/test.sh", f"ls {other.directory}", f"ls {wrapped.root}/sandboxes", "ls /root/.ssh",
            "touch /usr/x", "touch /etc/x", "touch /x", "touch /dev/x", "touch /tests/x", "mkdir /logs",
            f"kill -0 {os.getpid()}", f"touch {wrapped.root}/shown/x",
        ]  # fmt: skip
        for attempt in attempts:
            result = await box.run(["sh", "-c", attempt], deadline_s=LONG, visible=[str(wrapped.root / "shown")])
            assert result.exit_code not in (0, None), attempt
        await box.run([str(wrapped.root / "shown" / "program")], deadline_s=LONG, visible=[str(wrapped.root / "shown")])
        assert box.log_text() == "shown\n"
        look = "ls /proc | grep -c '^[0-9]'; hostname; grep CapEff /proc/self/status; env | grep -c FORGE_RAY"
        await box.run(["sh", "-c", look], deadline_s=LONG)
        processes, host, capabilities, marks = box.log_text().splitlines()
        assert int(processes) < 6 and host == "sandbox" and capabilities.split()[1].strip("0") == "" and marks == "0"


NOISE = r"printf '\377\360\050\n'; head -c 100000 /dev/urandom; : > \"$(printf 'caf\351.txt')\"; head -c 5000000 /dev/zero | tr '\0' x"


async def test_output_that_is_no_text(maker: Maker) -> None:
    noise = NOISE.replace('\\"', '"')
    maker.task(test=f"#!/bin/sh\n{noise}\n{ALWAYS_ONE.splitlines()[1]}\n")
    async with await maker.sandbox(log_bytes=100_000) as box:
        result = await box.run(["sh", "-c", noise], deadline_s=LONG)
        assert result.exit_code == 0 and result.log_bytes == 5_100_004
        assert 100_000 < result.log.stat().st_size < 100_100
        text = box.log_text()
        assert text.startswith("\ufffd") and "bytes left out" in text and text.endswith("x" * 1000)
        assert (await box.verify(timeout_s=LONG)).reward == 1.0
        assert 100_000 < (maker.logs / "verifier.log").stat().st_size < 100_100
        assert os.listdir(os.fsencode(box.directory / "workspace")) == [b"caf\xe9.txt"]


async def test_an_unsupported_task_is_refused_by_name(tmp_path: Path) -> None:
    maker = Maker(tmp_path, "none")
    maker.task(test="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n", toml="[environment]\ngpus = 2")
    with pytest.raises(UserError, match=r"environment.gpus.*tests/test.sh names /logs/verifier literally"):
        await maker.sandbox()
    assert maker.clean()


async def test_planted_links_are_not_followed(maker: Maker) -> None:
    (maker.root / "outside").mkdir()
    (maker.root / "outside" / "secret").write_text("s")
    async with await maker.sandbox() as box:
        for name in ("link", "file"):
            os.symlink(maker.root / "outside" / ("secret" if name == "file" else ""), box.directory / "workspace" / name)
        os.mkfifo(box.directory / "workspace" / "fifo")
        await box.put({"file": "mine"}, to="workspace")
        assert (maker.root / "outside" / "secret").read_text() == "s" and await box.read("file") == b"mine"
        for path in ("link/x", "../x", "/x"):
            with pytest.raises((SandboxError, ValueError)):
                await box.put({path: "x"}, to="workspace")
        assert os.listdir(maker.root / "outside") == ["secret"]
        for path in ("link/secret", "fifo", "none", f"{box.workspace}/none", f"{box.home}/none", "."):
            with pytest.raises((FileNotFoundError, ValueError)):
                await box.read(path)
        assert await box.read(f"{box.workspace}/file", limit=2) == b"mi"


def test_bad_names_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not safe"):
        ProcessBackend(SandboxConfig(directory=str(tmp_path)), "../run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"sandbox\.directory"):
        ProcessBackend(SandboxConfig(directory=str(tmp_path / "file")), "run")
    with pytest.raises(UserError, match=r"sandbox\.directory"):
        ProcessBackend(SandboxConfig(directory="/proc/nothing"), "run")


async def test_the_directory_that_another_pool_takes_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of one run share a directory, which goes with its last sandbox: here at the worst moment, just after it was seen."""
    task = load_task(make_task(tmp_path / "task", test=ALWAYS_ONE))
    backend = ProcessBackend(SandboxConfig(directory=str(tmp_path / "boxes"), isolation="none"), "run")
    shared, mkdir, taken = tmp_path / "boxes" / "run", os.mkdir, []

    def take_away(path: str | Path, *args: int) -> None:
        try:
            mkdir(path, *args)
        except FileExistsError:
            if Path(path) == shared and not taken:
                taken.append(path)
                shared.rmdir()
            raise

    shared.mkdir(parents=True)
    monkeypatch.setattr(os, "mkdir", take_away)
    sandbox = await backend.create(task, "one", tmp_path / "logs")
    assert taken and (shared / "one").is_dir()
    await sandbox.destroy()
    shared.symlink_to(tmp_path / "nowhere")
    with pytest.raises(SandboxError, match="cannot be made"):
        await backend.create(task, "two", tmp_path / "logs")


def test_bubblewrap_that_is_asked_for_and_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.probe.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(UserError, match=r"sandbox\.isolation: bubblewrap is not installed"):
            ProcessBackend(SandboxConfig(isolation="bubblewrap", directory=str(tmp_path)), "run")
        backend = ProcessBackend(SandboxConfig(directory=str(tmp_path)), "run")
        assert (backend.isolation, backend.reason) == ("none", "bubblewrap is not installed")
        (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        bubblewrap.probe.cache_clear()
        assert "No permissions" in ProcessBackend(SandboxConfig(directory=str(tmp_path)), "run").reason
    finally:
        bubblewrap.probe.cache_clear()


def test_the_interface_is_kept(tmp_path: Path) -> None:
    backend: SandboxBackend = ProcessBackend(SandboxConfig(directory=str(tmp_path)), "run")  # pyright checks the rest
    box: type[Sandbox] = ProcessSandbox
    assert backend.name == "process" and {name for name in vars(Sandbox) if not name.startswith("_")} <= set(dir(box))
