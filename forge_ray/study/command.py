"""A `forge-ray` command below this one: the signals that this process hears are passed on to it, and it does not outlive this process.

It has a process group of its own, so that a Ctrl-C reaches it once, through here, and not twice.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

INTERRUPTED = 130
"""Exit code of a command that a signal has stopped."""
_PR_SET_PDEATHSIG = 1


def forge_ray(words: Sequence[str], keep: Sequence[int] = ()) -> int:
    """Run `forge-ray` with these words on this terminal; `obey`'s result."""
    return obey([sys.executable, "-m", "forge_ray.cli.main", *words], keep)


def obey(argv: Sequence[str], keep: Sequence[int] = ()) -> int:
    """Run a program to its end and return its exit code; `INTERRUPTED` where a SIGINT or SIGTERM was passed on to it. Of this process's
    open files it gets `keep`. Should this process be killed, the program is sent SIGTERM. To be called in the main thread."""
    parent, heard = os.getpid(), False
    process: subprocess.Popen[bytes] | None = None

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    def pass_on(number: int, _: Any) -> None:
        nonlocal heard
        heard = True
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, process_group=0, pass_fds=keep, preexec_fn=end_with_parent)
        if heard:  # before there was anything to pass it on to
            process.send_signal(signal.SIGINT)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return INTERRUPTED if heard else code
