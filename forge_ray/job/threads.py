"""Threads that call into Ray and cannot be stopped: deploying, removing an app, training.

Once Ray is shut down, such a thread ends the whole process from inside Ray's native code, with an exit code of Ray's own. So while one
is alive Ray is not shut down and the process leaves at once instead (`leave`): the cluster notices that its driver is gone, and the guard
(`guard.py`) sees to what it started. They are daemon threads, since nobody may wait for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from forge_ray.train_loop.trainer import THREAD as TRAINER

P = ParamSpec("P")
T = TypeVar("T")
NAME = "forge-ray Ray call"
ENDED = "forge-ray Ray call, ended"
"""Name of the thread once its function has returned: it may be there for a moment longer than the future waits."""


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Run `function` in a thread of its own; a cancelled future leaves it running."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            threading.current_thread().name = ENDED
            future.set_exception(error)
        else:
            threading.current_thread().name = ENDED
            future.set_result(result)

    threading.Thread(target=work, name=NAME, daemon=True).start()
    return asyncio.wrap_future(future)


def busy() -> bool:
    """Whether a thread of this process may be inside Ray."""
    return any(thread.name in (NAME, TRAINER) for thread in threading.enumerate())


def leave(code: int) -> None:
    """End the process with `code` if a thread may be inside Ray; else do nothing."""
    if busy():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
