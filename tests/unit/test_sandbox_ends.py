"""How a sandbox's command ends, by itself, at its deadline, cancelled, or with its owner: no process of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forge_ray.sandboxes import owner, process, processes
from forge_ray.sandboxes.log_pipe import LogPipe
from forge_ray.sandboxes.processes import MARKER
from forge_ray.sandboxes.running import Running
from forge_ray.sandboxes.sandbox import SandboxError
from forge_ray.tasks.task import load_task
from tests.sandbox_maker import DAEMON, LONG, Maker, alive, gone, token


async def test_a_deadline_kills_what_ignores_everything(maker: Maker) -> None:
    mark = token()
    async with await maker.sandbox() as box:
        await box.put({"daemon.py": DAEMON.replace("TOKEN", mark)}, to="workspace")
        child = f"(trap '' TERM; setsid sh -c 'sleep 1000; : {mark}')"
        script = f"trap '' TERM HUP INT; python3 daemon.py; {child} & echo up; while :; do sleep 1; done"
        for deadline in (3, 12, 48):  # it must have come up, which may take long
            started = time.monotonic()
            result = await box.run(["sh", "-c", script], deadline_s=deadline)
            assert result.timed_out and result.limit == "time" and result.exit_code is None and f"limit is {deadline} s" in result.detail
            assert result.seconds <= time.monotonic() - started and not alive(mark)
            if "up" in box.log_text():
                break
        assert "up" in box.log_text()
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


STARTING = """
import os, time
while not os.path.exists("go"): time.sleep(0.01)
if os.fork() == 0: os.execvp("sh", ["sh", "-c", "sleep 1000; : MARK"])
time.sleep(1000)
"""


async def test_bubblewrap_that_is_killed_while_it_makes_its_init_leaves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, look = token(), processes.only_child
    (tmp_path / "bubblewrap.py").write_text(STARTING.replace("MARK", mark))
    pipe = LogPipe(tmp_path / "x.log", 1000)
    running = Running([sys.executable, "bubblewrap.py"], os.environ, tmp_path, pipe, "bubblewrap", subprocess.DEVNULL)

    def just_before(pid: int) -> int | None:
        found = look(pid)
        (tmp_path / "go").touch()
        while processes.state(pid) not in ("T", "Z") and not alive(mark):
            time.sleep(0.01)
        return found

    monkeypatch.setattr(processes, "only_child", just_before)
    running.stop()
    with pytest.raises(SandboxError, match="destroyed"):
        await running.wait(LONG, None)
    assert not alive(mark)
    pipe.close()


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


async def test_pools_that_find_one_leftover_take_it_once(tmp_path: Path) -> None:
    maker = Maker(tmp_path, "none")
    backend, dead = maker.backend(), f'"pid": {1 << 22}'

    async def left(name: str) -> None:
        box = await maker.sandbox(name)
        for number in range(50):
            (box.directory / "workspace" / str(number)).mkdir()
        signed = box.directory / owner.FILE
        signed.write_text(signed.read_text().replace(f'"pid": {os.getpid()}', dead))

    for number in range(8):
        await left(f"g{number}")
    found = await backend.leftovers()
    assert len(found) == 8
    await asyncio.gather(*(maker.backend().destroy_leftover(leftover) for leftover in found for _ in range(4)))
    assert maker.clean()
    await left("g0")
    (leftover,) = await backend.leftovers()
    box = await maker.sandbox("g0")  # another pool cleared it and has begun anew
    await backend.destroy_leftover(leftover)
    assert (box.directory / "workspace").is_dir()
    await box.destroy()
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
