"""A process beside a cluster of this run's own: ends what the cluster leaves behind when the driver is gone.

When the driver ends without `ray.shutdown`, the kernel kills Ray's daemons with it, and so nobody ends what those had started: Serve's
HAProxy keeps the port, and the resumed run would be refused; Ray's agents stay for a minute. All of it is found by a mark that it has
inherited in its environment or, where Ray has written a title over that, by the files that it has open in the cluster's session
directory. Run as a script, standard library only; it ends with the last of them.

After that nobody needs the cluster's directories: HAProxy's goes, and Ray's session with it if the run ended as it should (`forget`).
The logs of one that failed stay.

    python -I -S guard.py DRIVER MARK SESSION_DIRECTORY [DIRECTORY …]
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time

NAME = "FORGE_RAY_CLUSTER"
"""Environment variable with the mark."""

FORGET = "forge-ray-ended-well"
"""File in a session directory that is to be removed."""

GRACE_S = 3.0
"""Time for Ray and the sandboxes' supervisors to end by themselves."""

GIVE_UP_S = 60.0


def mark() -> None:
    """Mark whatever this process starts from now on."""
    os.environ[NAME] = secrets.token_hex(16)


def start(session: str, *directories: str) -> subprocess.Popen[bytes]:
    """Have whatever is marked or belongs to the Ray session in directory `session` ended after this process, and `directories` removed."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[NAME], session, *directories],
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is not for it
    )


def forget(session: str) -> None:
    """Have the guard remove the Ray session in directory `session` too."""
    with contextlib.suppress(OSError):
        open(os.path.join(session, FORGET), "w").close()


def _remove(session: str, directories: list[str]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    if not os.path.exists(os.path.join(session, FORGET)) or not os.path.basename(session).startswith("session_"):
        return
    shutil.rmtree(session, ignore_errors=True)
    latest = os.path.join(os.path.dirname(session), "session_latest")
    with contextlib.suppress(OSError):
        if os.path.realpath(latest) == os.path.realpath(session):
            os.unlink(latest)


def _belongs(process: str, mark: bytes, session: str) -> bool:
    try:
        with open(f"{process}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                return True
        files = os.listdir(f"{process}/fd")
    except OSError:  # gone, or somebody else's
        return False
    for file in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"{process}/fd/{file}").startswith(session):
                return True
    return False


def _left(mark: bytes, session: str) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _belongs(f"/proc/{name}", mark, session)]


def _wait(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os.close(handle)


def main() -> None:
    driver, mark, session = int(sys.argv[1]), f"{NAME}={sys.argv[2]}".encode(), sys.argv[3].rstrip("/") + "/"
    _wait(driver)
    gone, none = time.monotonic(), 0
    # None in two looks: one misses a process that just becomes another program, and the child of one that ends while it is listed.
    while none < 2 and time.monotonic() - gone < GIVE_UP_S:
        found = _left(mark, session)
        none = 0 if found else none + 1
        if time.monotonic() - gone > GRACE_S:
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.2)
    _remove(session.rstrip("/"), sys.argv[4:])


if __name__ == "__main__":
    main()
