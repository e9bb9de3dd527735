"""A process beside a cluster of this run's own: ends what the cluster leaves behind when the driver is gone.

When the driver ends without `ray.shutdown`, the kernel kills Ray's daemons with it, and so nobody ends what those had started: Serve's
HAProxy keeps the port, and the resumed run would be refused; Ray's agents stay for a minute. All of it is found by a mark that it has
inherited in its environment or, where Ray has written a title over that, by the files that it has open in the cluster's session
directory. Run as a script, standard library only; it ends with the last of them.

    python -I -S guard.py DRIVER MARK SESSION_DIRECTORY
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time

NAME = "FORGE_RAY_CLUSTER"
"""Environment variable with the mark."""

GRACE_S = 3.0
"""Time for Ray and the sandboxes' supervisors to end by themselves."""

GIVE_UP_S = 60.0


def mark() -> None:
    """Mark whatever this process starts from now on."""
    os.environ[NAME] = secrets.token_hex(16)


def start(session: str) -> subprocess.Popen[bytes]:
    """Have whatever is marked or belongs to the Ray session in directory `session` ended after this process."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[NAME], session],
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is not for it
    )


def _belongs(process: str, mark: bytes, session: str) -> bool:
    try:
        with open(f"{process}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                return True
        return any(os.readlink(entry.path).startswith(session) for entry in os.scandir(f"{process}/fd"))
    except OSError:  # gone, or somebody else's
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
    gone = time.monotonic()
    while (found := _left(mark, session)) and time.monotonic() - gone < GIVE_UP_S:
        if time.monotonic() - gone > GRACE_S:
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.2)


if __name__ == "__main__":
    main()
