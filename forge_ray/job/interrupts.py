"""SIGINT and SIGTERM over the life of a run: the first ends it, the others do nothing, from the first moment to the end of the process.

A signal that comes while everything is being taken down would otherwise leave half of it behind, or put a traceback in the place of exit
code 130.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

BOTH = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def while_blocking() -> Iterator[None]:
    """For a body that blocks the event loop, in which only a raised exception is heard: the first SIGINT cancels the current task once the
    loop goes on, the second raises `KeyboardInterrupt` where it stands, the others are ignored."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    seen = 0

    def heard(number: int, _: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            log.info("SIGINT: stopping")
            loop.call_soon_threadsafe(task.cancel)
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, heard)
    yield
    signal.signal(signal.SIGINT, before)  # not after an exception: then the process is on its way out


def cancel_once() -> None:
    """Let the first SIGINT or SIGTERM cancel the current task."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        log.info("%s: stopping", number.name)
        ignore()
        task.cancel()

    for number in BOTH:
        loop.add_signal_handler(number, stop, number)


def ignore() -> None:
    """Hear neither signal, in the running loop."""
    for number in BOTH:
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)


def done(*, leaving: bool) -> None:
    """Give the signals back, or, where the process is `leaving`, have them ignored to its end. No signal slips in between."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BOTH)
    try:
        for number in BOTH:
            asyncio.get_running_loop().remove_signal_handler(number)
            if leaving:
                signal.signal(number, signal.SIG_IGN)  # drops what has come meanwhile
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
