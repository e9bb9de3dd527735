"""The process sandbox, with and without bubblewrap: real commands, real processes, nothing left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Sandbox as SandboxConfig
from forge_ray.errors import UserError
from forge_ray.sandboxes import bubblewrap, limits, owner, process
from forge_ray.sandboxes.process import ProcessBackend, ProcessSandbox
from forge_ray.sandboxes.processes import MARKER
from forge_ray.sandboxes.sandbox import Sandbox, SandboxBackend, SandboxError
from forge_ray.tasks import verifier
from forge_ray.tasks.task import load_task
from tests.sandbox_maker import Maker, alive, gone, needs_bubblewrap, token
from tests.task_maker import ALWAYS_ONE

LONG = 120.0
"""A deadline that no test reaches."""

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.chdir("/")
for fd in range(20):
    try: os.close(fd)
    except OSError: pass
os.execve("/bin/sh", ["sh", "-c", "trap '' TERM HUP INT; while :; do sleep 0.1; done; : TOKEN"], {})
"""
"""A process that has left parent, group, session, directory, environment and every open file, and ignores what can be ignored."""


@pytest.fixture(params=["bubblewrap", "none"])
def maker(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    if request.param == "bubblewrap":
        needs_bubblewrap()
    return Maker(tmp_path, request.param)


@pytest.fixture
def wrapped(tmp_path: Path) -> Maker:
    needs_bubblewrap()
    return Maker(tmp_path, "bubblewrap")


def python(code: str) -> list[str]:
    return ["python3", "-c", textwrap.dedent(code)]


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


async def test_a_deadline_kills_what_ignores_everything(maker: Maker) -> None:
    mark = token()
    async with await maker.sandbox() as box:
        await box.put({"daemon.py": DAEMON.replace("TOKEN", mark)}, to="workspace")
        child = f"(trap '' TERM; setsid sh -c 'sleep 1000; : {mark}')"
        script = f"trap '' TERM HUP INT; python3 daemon.py; {child} & echo up; while :; do sleep 1; done"
        started = time.monotonic()
        result = await box.run(["sh", "-c", script], deadline_s=3)
        assert result.timed_out and result.limit == "time" and result.exit_code is None and "limit is 3 s" in result.detail
        assert result.seconds <= time.monotonic() - started
        assert "up" in box.log_text() and not alive(mark)
    assert maker.clean()


async def test_daemons_end_with_the_command(maker: Maker) -> None:
    mark = token()
    async with await maker.sandbox() as box:
        await box.put({"daemon.py": DAEMON.replace("TOKEN", mark)}, to="workspace")
        result = await box.run(["sh", "-c", "for i in 1 2 3; do python3 daemon.py; done; sleep 1000 & exit 0"], deadline_s=LONG)
        assert result.exit_code == 0 and not alive(mark)


async def test_killing_the_supervisor_frees_nobody(tmp_path: Path) -> None:
    maker, mark = Maker(tmp_path, "none"), token()
    async with await maker.sandbox() as box:
        script = f"setsid sh -c 'sleep 1000; : {mark}' & sleep 0.5; kill -9 $PPID; sleep 1000; : {mark}"
        result = await box.run(["sh", "-c", script], deadline_s=LONG)
        assert result.exit_code == 137 and not alive(mark)


async def test_cancelling_frees_nobody_whose_supervisor_was_killed(tmp_path: Path) -> None:
    """As happens where it takes too long to end: on a machine that stands still."""
    maker, mark = Maker(tmp_path, "none"), token()
    async with await maker.sandbox() as box:
        task = asyncio.create_task(box.run(["sh", "-c", f"setsid sh -c 'sleep 1000; : {mark}' & echo up; wait"], deadline_s=LONG))
        while "up" not in box.log_text():
            await asyncio.sleep(0.05)
        assert box._running is not None
        os.kill(box._running._process.pid, signal.SIGKILL)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not alive(mark)


async def test_cancelling_kills(maker: Maker) -> None:
    mark = token()
    async with await maker.sandbox() as box:
        task = asyncio.create_task(box.run(["sh", "-c", f"sleep 1000; : {mark}"], deadline_s=LONG))
        while not alive(mark):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not alive(mark)
        assert (await box.run(["true"], deadline_s=LONG)).exit_code == 0


async def test_cancelling_while_it_is_made_leaves_nothing(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(image: Any, workspace: Path) -> None:
        entered.set()
        assert go_on.wait(60)

    monkeypatch.setattr(process, "lay_out", slow)
    making = asyncio.create_task(maker.sandbox())
    await asyncio.to_thread(entered.wait, 60)
    assert not maker.clean()
    making.cancel()
    await asyncio.sleep(0.05)
    making.cancel()  # once more, as a pool does that is shut down
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert maker.clean()


async def test_destroying_ends_a_running_command(maker: Maker) -> None:
    mark = token()
    box = await maker.sandbox()
    task = asyncio.create_task(box.run(["sh", "-c", f"sleep 1000; : {mark}"], deadline_s=LONG))
    while not alive(mark):
        await asyncio.sleep(0.05)
    await box.destroy()
    with pytest.raises(SandboxError, match="destroyed"):
        await task
    assert not alive(mark) and maker.clean()
    await box.destroy()
    with pytest.raises(SandboxError):
        await box.run(["true"], deadline_s=LONG)


ORPHAN = """
import asyncio, sys
from pathlib import Path
from forge_ray.config import Sandbox
from forge_ray.sandboxes.process import ProcessBackend
from forge_ray.tasks.task import load_task

async def main(directory, isolation, task, logs, mark):
    backend = ProcessBackend(Sandbox(isolation=isolation, directory=directory), "run")
    box = await backend.create(load_task(task), "orphan", Path(logs))
    await box.run(["sh", "-c", f"trap '' TERM; setsid sh -c 'sleep 1000; : {mark}' & sleep 1000; : {mark}"], deadline_s=1000)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_owner_leaves_a_leftover_and_no_process(maker: Maker) -> None:
    mark = token()
    maker.task()
    arguments = [str(maker.root / "sandboxes"), maker.isolation, str(maker.directory), str(maker.logs), mark]
    process = subprocess.Popen([sys.executable, "-c", ORPHAN, *arguments])
    while len(alive(mark)) < 2:
        assert process.poll() is None
        await asyncio.sleep(0.05)
    backend = maker.backend()
    assert await backend.leftovers() == []  # its owner lives
    with pytest.raises(SandboxError, match="in use"):
        await backend.create(load_task(maker.directory), "orphan", maker.logs)
    process.kill()
    process.wait()
    await gone(mark)
    (leftover,) = await backend.leftovers()
    assert (leftover.run, leftover.rollout) == ("run", "orphan")
    await backend.destroy_leftover(leftover)
    assert await backend.leftovers() == [] and maker.clean()


async def test_a_leftover_takes_its_living_processes_with_it(maker: Maker) -> None:
    box = await maker.sandbox("old")
    # What could only survive a kill of everything above it: a process that carries the sandbox's marker.
    survivor = subprocess.Popen(["sleep", "1000"], env={MARKER: str(box.directory)}, start_new_session=True)
    signed = box.directory / owner.FILE
    signed.write_text(signed.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {survivor.pid}'))
    fresh = await maker.sandbox("old")  # the same slot again: cleared first
    assert survivor.wait(60) == -signal.SIGKILL
    assert list((fresh.directory / "workspace").iterdir()) == []
    await fresh.destroy()
    assert maker.clean()


def test_another_hosts_sandbox_is_not_ours_to_remove(tmp_path: Path) -> None:
    owner.sign(tmp_path, "run", "r")
    text = (tmp_path / owner.FILE).read_text()
    assert not owner.abandoned(tmp_path)
    changes = ((f'"pid": {os.getpid()}', '"pid": 4194304', True), ('"boot": "', '"boot": "x', True), ('"host": "', '"host": "x', False))
    for old, new, verdict in changes:
        (tmp_path / owner.FILE).write_text(text.replace(old, new))
        assert owner.abandoned(tmp_path) is verdict
    (tmp_path / owner.FILE).write_text("{")
    assert not owner.abandoned(tmp_path)
    os.utime(tmp_path, (0, 0))
    assert owner.abandoned(tmp_path)


async def test_memory_limit_of_a_task_acts_and_is_named(maker: Maker) -> None:
    maker.task(toml='[environment]\nmemory = "1G"\nstorage = "2G"', test="#!/bin/sh\nexit 0\n")
    async with await maker.sandbox() as box:
        small = await box.run(python("x = bytearray(400 << 20); print(len(x))"), deadline_s=LONG)
        assert small.exit_code == 0
        large = await box.run(python("x = bytearray(1536 << 20); print(len(x))"), deadline_s=LONG)
        assert (large.limit, large.exit_code) == ("memory", 1)
        assert "out of memory" in large.detail and "1024 MB" in large.detail


async def test_limits_of_cpu_files_and_descriptors(maker: Maker) -> None:
    async with await maker.sandbox(cpu_seconds=1, open_files=40, file_mb=1) as box:
        assert (await box.run(["sh", "-c", "while :; do :; done"], deadline_s=LONG)).limit == "cpu"
        big = await box.run(["sh", "-c", "exec head -c 3000000 /dev/zero > big"], deadline_s=LONG)
        assert big.limit == "file" and os.stat(box.directory / "workspace" / "big").st_size == 1 << 20
        opening = "fs = []\ntry:\n  while True: fs.append(open('/dev/null'))\nexcept OSError as e: print(e.errno, len(fs) < 40)"
        await box.run(python(opening), deadline_s=LONG)
        assert box.log_text() == "24 True\n"
        await box.run(["sh", "-c", "ulimit -c"], deadline_s=LONG)
        assert box.log_text() == "0\n"


async def test_limit_of_processes(maker: Maker) -> None:
    mark = token()
    async with await maker.sandbox(processes=20) as box:
        fine = await box.run(["sh", "-c", "for i in 1 2 3 4 5; do sleep 0.1 & done; wait; echo fine"], deadline_s=LONG)
        assert fine.exit_code == 0 and box.log_text() == "fine\n"
        script = f"for i in $(seq 60); do sh -c 'sleep 300; : {mark}' & done; wait"
        result = await box.run(["sh", "-c", script], deadline_s=LONG)
        assert result.limit == "processes" or (bubblewrap.counts_processes() and "fork" in box.log_text())
        assert not alive(mark)


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


async def test_a_log_flood_is_bounded_and_ends_at_the_deadline(maker: Maker) -> None:
    async with await maker.sandbox(log_bytes=50_000) as box:
        result = await box.run(["sh", "-c", "echo first; exec yes"], deadline_s=2)
        assert result.timed_out and result.log.stat().st_size < 50_100 and result.log_bytes > 1_000_000
        assert box.log_text().startswith("first\ny\n")


CHECKING = """#!/bin/bash
set -u
cd "${WORKSPACE:-/workspace}"
ls -A "${TESTS_DIR:-/tests}" "${VERIFIER_DIR:-/logs/verifier}" ~
if [ "$(cat answer.txt 2>/dev/null)" = "$(cat "${TESTS_DIR:-/tests}/expected.txt")" ]; then r=1; else r=0; fi
echo "{\\"reward\\": $r, \\"speed\\": 2}" > "${VERIFIER_DIR:-/logs/verifier}/reward.json"
exit 3
"""


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("41", 0.0), (None, 0.0)])
async def test_a_verifier_judges_the_workspace(maker: Maker, answer: str | None, reward: float) -> None:
    maker.task(test=CHECKING, tests={"expected.txt": "42\n"})
    async with await maker.sandbox() as box:
        if answer:
            await box.run(["sh", "-c", f"echo {answer} > answer.txt"], deadline_s=LONG)
        verdict = await box.verify(timeout_s=LONG)
        assert (verdict.reward, verdict.rewards) == (reward, {"reward": reward, "speed": 2.0})


async def test_the_harness_can_neither_see_nor_prepare_the_verification(maker: Maker) -> None:
    maker.task(test=CHECKING, tests={"expected.txt": "42\n", "sub/lib.py": ""})
    async with await maker.sandbox() as box:
        await box.put({"daemon.py": DAEMON}, to="workspace")
        # Where the verifier will look. The real root is written to only where it is the sandbox's own.
        bases = "'' ../verifier" if maker.isolation == "bubblewrap" else "../verifier"
        script = f"""
        for base in {bases}; do
          cat $base/tests/expected.txt
          mkdir -p $base/tests $base/logs/verifier $base/home
          echo 'raise SystemExit' > $base/tests/conftest.py
          echo 42 > $base/tests/expected.txt
          echo 1 > $base/logs/verifier/reward.txt; echo '{{"reward": 1}}' > $base/logs/verifier/reward.json
        done 2>/dev/null
        echo 'echo 1 > $VERIFIER_DIR/reward.json' > ~/.bashrc
        python3 daemon.py
        echo wrong > answer.txt
        """
        await box.run(["bash", "-c", script], deadline_s=LONG)
        if maker.isolation == "bubblewrap":
            assert "42" not in box.log_text()
        verdict = await box.verify(timeout_s=LONG)
        assert verdict.reward == 0.0
        listed = set(box.log_text("verifier").split())
        assert {"expected.txt", "sub", "test.sh"} <= listed and not listed & {"conftest.py", ".bashrc", "reward.txt"}
        # A second verification starts as clean as the first.
        assert (await box.verify(timeout_s=LONG)).reward == 0.0


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("exit 0", verifier.RewardMissing, ["reward.json", "exit code 0"]),
        ("no-such-tool || exit 9", verifier.RewardMissing, ["exit code 9"]),
        ("kill -9 $$", verifier.VerifierKilled, ["137"]),
        ("echo '{' > $VERIFIER_DIR/reward.json; echo 1 > $VERIFIER_DIR/reward.txt", verifier.RewardMalformed, ["reward.json"]),
        ("ln -s /etc/hostname $VERIFIER_DIR/reward.txt", verifier.RewardMalformed, ["reward.txt"]),
        ("rm -rf $VERIFIER_DIR", verifier.VerifierError, []),
        ("echo 1 > $VERIFIER_DIR/reward.txt; trap '' TERM; while :; do sleep 1; done", verifier.VerifierTimeout, ["limit is 2 s"]),
    ],
)
async def test_a_verifier_that_fails_gives_no_reward(
    maker: Maker, body: str, error: type[verifier.VerifierError], words: list[str]
) -> None:
    maker.task(test=f"#!/bin/sh\n{body}\n")
    async with await maker.sandbox() as box:
        with pytest.raises(error) as caught:
            await box.verify(timeout_s=2 if error is verifier.VerifierTimeout else LONG)
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


async def test_the_verifier_has_its_own_environment_and_harbors_paths(wrapped: Maker) -> None:
    checks = "[ $PWD = /workspace ] && [ $HOME = /home/agent ] && [ -x /tests/test.sh ] && [ -d /logs/agent ]"
    test = f"#!/bin/bash\n{checks} && echo $A$B > /logs/verifier/reward.txt\n"
    wrapped.task(toml='environment.env = { A = "0", B = "5" }\nverifier.env = { A = "1" }', test=test)
    async with await wrapped.sandbox() as box:
        assert (await box.verify(timeout_s=LONG)).reward == 15.0


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


async def test_many_at_once(maker: Maker) -> None:
    maker.task(test=CHECKING, tests={"expected.txt": "42\n"})

    async def rollout(number: int) -> tuple[float | None, str]:
        async with await maker.sandbox(f"g{number}-0.0") as box:
            await box.run(["sh", "-c", f"echo {42 if number % 2 else number} > answer.txt"], deadline_s=LONG)
            digest = await box.archive(maker.root / "archive")
            return (await box.verify(timeout_s=LONG)).reward, digest

    results = await asyncio.gather(*(rollout(number) for number in range(20)))
    assert [reward for reward, _ in results] == [float(number % 2) for number in range(20)]
    stored = sorted(path.name for path in (maker.root / "archive").iterdir())
    assert stored == sorted({f"{digest}.tar.gz" for _, digest in results}) and len(stored) == 11
    assert maker.clean()


def test_the_interface_is_kept(tmp_path: Path) -> None:
    backend: SandboxBackend = ProcessBackend(SandboxConfig(directory=str(tmp_path)), "run")  # pyright checks the rest
    box: type[Sandbox] = ProcessSandbox
    assert backend.name == "process" and {name for name in vars(Sandbox) if not name.startswith("_")} <= set(dir(box))


@pytest.mark.parametrize(("kills", "limit", "words"), [((3, 3), None, "killed by SIGKILL"), ((3, 4), "memory", "out of memory")])
async def test_a_sigkill_is_out_of_memory_only_where_the_kernel_says_so(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, int], limit: str | None, words: str
) -> None:
    counted = iter(kills)
    monkeypatch.setattr(process, "oom_kills", lambda: next(counted))
    async with await maker.sandbox() as box:
        # The shell of a sandbox cannot kill itself, being the init of its process table: a child of it can.
        result = await box.run(["sh", "-c", "sh -c 'kill -KILL $$'; exit $?"], deadline_s=LONG)
        assert (result.exit_code, result.limit) == (137, limit) and words in result.detail


def test_the_out_of_memory_killers_count_can_be_read() -> None:
    assert limits.oom_kills() >= 0
    bound = limits.Limits(cpu_seconds=1)
    assert bound.recognise(137, b"", cpu_seconds=7) == "cpu" and bound.recognise(137, b"", cpu_seconds=3) is None
    assert limits.Limits(memory_mb=5).recognise(137, b"MemoryError") == "memory"
