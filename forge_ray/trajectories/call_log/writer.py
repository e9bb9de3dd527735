"""The durable writer: one thread, group commit, every waiter gets a true answer.

Every file is created exclusively, so nobody ever appends behind a torn line of a dead process. Whatever has queued up while the
thread synced goes into its next write, so the cost of a sync is shared. A line that a reader can see whole is never taken back:
after a short write only the torn tail is cut off, and later appends may succeed again; after a failed sync nothing is promised
any more and every append fails.

An event that nobody must wait for can be *held*: the thread gets it with the next one that is appended, or a moment later. A wake-up of the
thread and a sync cost more than all else that a call's events cost, so a call that holds its first and its last event pays for one.

A file that has grown to `segment_bytes` is left behind for good, for the compactor to take; the writer goes on in the next one (see
`segments`). Where that cannot be created (a full disk) the old one goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from forge_ray.disk import sync
from forge_ray.trajectories.call_log import segments
from forge_ray.trajectories.call_log.errors import CallLogError

HOLD_S = 0.01
"""Longest time that an event is held."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """One event on its way to the disk."""

    line: bytes
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    after: asyncio.Future[None] | None


class CallLogWriter:
    """Appends events to new files at `path`; each `append` returns once its event is on the disk.

    `path` is `<replica>.jsonl`. `segment_bytes`: size at which a file is followed by the next one; None: never.
    """

    def __init__(self, path: str | os.PathLike[str], *, segment_bytes: int | None = None) -> None:
        self.path = Path(path)
        """The file that is being written."""
        self._replica, self._number, self._bound = self.path.stem, 0, segment_bytes
        self._next_try = segment_bytes
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _create(self.path)
        except FileExistsError:
            raise CallLogError(f"{self.path}: exists already; every replica incarnation writes files of its own") from None
        except OSError as error:
            raise CallLogError(f"{self.path}: cannot be created ({error})") from error
        self._size = 0
        self._broken: CallLogError | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[list[_Waiting] | None] = queue.SimpleQueue()
        self._held: list[_Waiting] = []
        self._lost: WeakSet[asyncio.Future[None]] = WeakSet()
        """Of events that are not on disk. The thread's own."""
        self._thread = threading.Thread(target=self._run, name=f"call-log-{self.path.stem}", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> CallLogError | None:
        """Set for good when the state of the file on disk is unknown (a sync failed): the replica should be replaced."""
        return self._broken

    async def append(self, event: dict[str, Any]) -> None:
        """Write `event` as one line and return when it is synced. Cancelling the wait does not take the event back.

        Raises `CallLogError` if it is not on disk for certain.
        """
        await self.put(event)

    def put(self, event: dict[str, Any], *, after: asyncio.Future[None] | None = None) -> asyncio.Future[None]:
        """`append` without waiting: done, or failed with `CallLogError`, once that is known. Everything that is held goes before it. If the
        event whose `put` or `hold` gave `after` is not on disk, this one is not written either."""
        return self._take(event, after, hold=False)

    def hold(self, event: dict[str, Any]) -> asyncio.Future[None]:
        """As `put`, but written with the next event that is put, at the latest `HOLD_S` later, or when `flush` is called."""
        return self._take(event, None, hold=True)

    def flush(self) -> None:
        """Hold nothing any longer."""
        with self._lock:
            self._hand_over()

    def _take(self, event: dict[str, Any], after: asyncio.Future[None] | None, *, hold: bool) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        try:
            line = _encode(event).encode() + b"\n"
        except (TypeError, ValueError) as error:
            what = f"event {event.get('event')!r} of {event.get('call', event.get('session'))!r}"
            done.set_exception(CallLogError(f"{self.path}: {what} is no JSON ({error})"))
            return done
        with self._lock:
            if self._closed:
                done.set_exception(CallLogError(f"{self.path}: the log is closed"))
                return done
            if hold and not self._held:
                loop.call_later(HOLD_S, self.flush)
            self._held.append(_Waiting(line, loop, done, after))
            if not hold:
                self._hand_over()
        return done

    def _hand_over(self) -> None:
        if self._held:
            self._queue.put(self._held)
            self._held = []

    def close(self) -> None:
        """Write what is queued, then close the file. Later appends fail. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._hand_over()
            self._queue.put(None)
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            while True:
                try:
                    batch.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            waiting = [item for items in batch if items is not None for item in items]
            if waiting:
                self._commit(waiting)
            if None in batch:
                return

    def _commit(self, waiting: list[_Waiting]) -> None:
        safe, error = 0, self._broken
        orphans = [item for item in waiting if item.after in self._lost] if self._lost else []
        if orphans:
            waiting = [item for item in waiting if item not in orphans]
        if error is None:
            try:
                safe, error = self._write([item.line for item in waiting])
                self._roll()
            except BaseException as unexpected:  # a waiter must never hang because this thread died
                error = self._broken = CallLogError(f"{self.path}: {unexpected!r}")
        self._lost.update(item.done for item in waiting[safe:])
        outcomes: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], CallLogError | None]]] = {}
        for index, item in enumerate(waiting):
            outcomes.setdefault(item.loop, []).append((item.done, None if index < safe else error))
        for item in orphans:
            outcomes.setdefault(item.loop, []).append((item.done, CallLogError(f"{self.path}: the event before it is not on disk")))
        for loop, settled in outcomes.items():
            try:
                loop.call_soon_threadsafe(_settle, settled)
            except RuntimeError:
                continue  # that loop is closed: nobody waits there any more

    def _write(self, lines: list[bytes]) -> tuple[int, CallLogError | None]:
        """Write and sync `lines`; how many of them are on disk, and what befell the others."""
        data, written, error = memoryview(b"".join(lines)), 0, None
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as cause:
            error = CallLogError(f"{self.path}: cannot be written ({cause.strerror or cause})")
        whole, size = len(lines), len(data)
        if error is not None:
            whole = size = 0
            for line in lines:
                if size + len(line) > written:
                    break
                whole, size = whole + 1, size + len(line)
        try:
            if size < written:
                os.ftruncate(self._file, self._size + size)
            os.fdatasync(self._file)
        except OSError as cause:  # after a failed sync the kernel may have dropped the pages: nothing more can be promised
            self._broken = CallLogError(f"{self.path}: cannot be synced ({cause.strerror or cause})")
            return 0, self._broken
        self._size += size
        return whole, error

    def _roll(self) -> None:
        """Go on in the next file if this one has reached its bound."""
        if self._next_try is None or self._bound is None or self._size < self._next_try or self._broken is not None:
            return
        path = self.path.with_name(segments.file_name(self._replica, self._number + 1))
        try:
            file = _create(path)
        except OSError:
            self._next_try = self._size + max(self._bound // 8, 1)
            return
        os.close(self._file)  # which gives up the claim
        self.path, self._file, self._number, self._size, self._next_try = path, file, self._number + 1, 0, self._bound


def _create(path: Path) -> int:
    """A new file for this process alone, its name on disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        segments.claim(file)
        sync(path.parent)
    except BaseException:
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return file


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _settle(settled: list[tuple[asyncio.Future[None], CallLogError | None]]) -> None:
    for done, error in settled:
        if done.done():  # its waiter was cancelled
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(CallLogError(str(error)))
