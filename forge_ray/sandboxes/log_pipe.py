"""A command's output, drained as long as it runs and kept within a bound: the first half and the last half of `limit` bytes.

Bytes are bytes: nothing is decoded here and no line is looked for, so neither binary output nor a line of any length matters. A
flood is slowed down once the bound is reached (the pipe fills up and the writer waits), so that one noisy command costs neither
disk nor event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

_CHUNK = 1 << 16
_PIPE_SIZES = (1 << 20, 1 << 18)
"""Sizes of the pipe that are asked for, bytes; where the kernel refuses (a user's share of pipe pages is used up) it keeps 64 KiB."""
_FLOOD_CHUNK = 1 << 20
_FLOOD_PAUSE = 0.02
"""Seconds of rest after each `_FLOOD_CHUNK` bytes of a flood: at most 50 MB a second."""


class LogPipe:
    """Reads one end of a pipe into a file. Make it, pass `write_end` to the command, `started()` after the fork, `close()` at the end."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.total = 0
        """Bytes read so far."""
        self._head = limit - limit // 2
        self._tail = bytearray()
        self._loop = asyncio.get_running_loop()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        for size in _PIPE_SIZES:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, size)
                break
        self._since_pause = 0
        self._pause: asyncio.TimerHandle | None = None
        self._open = True
        self._loop.add_reader(self._read_end, self._readable)

    def started(self) -> None:
        """The command holds the write end now."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Take what is still in the pipe and finish the file. No writer may be alive."""
        if not self._open:
            return
        self._open = False
        self.started()
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._read_end)
        with contextlib.suppress(BlockingIOError):
            while self._take(_FLOOD_CHUNK):
                pass
        os.close(self._read_end)
        left_out = self.total - self._head - len(self._tail)
        if left_out > 0:
            self._file.write(b"\n[... %d bytes left out ...]\n" % left_out)
        self._file.write(self._tail)
        self._file.close()

    def tail(self, size: int) -> bytes:
        """The last `size` bytes that are kept; to be called after `close`."""
        with open(self.path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read()

    def _readable(self) -> None:
        flood = self.total > self.limit
        try:
            more = self._take(_FLOOD_CHUNK if flood else _CHUNK)
        except BlockingIOError:
            return
        self._since_pause = self._since_pause + more if flood else 0
        if not more:
            self._loop.remove_reader(self._read_end)
        elif self._since_pause >= _FLOOD_CHUNK:
            self._since_pause = 0
            self._loop.remove_reader(self._read_end)
            self._pause = self._loop.call_later(_FLOOD_PAUSE, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._read_end, self._readable)

    def _take(self, size: int) -> int:
        """Read once; returns the number of bytes, 0 at the end of the stream."""
        data = os.read(self._read_end, size)
        head = max(0, self._head - self.total)
        self.total += len(data)
        if head:
            self._file.write(data[:head])
        keep = self.limit // 2
        if keep and len(data) > head:
            self._tail += data[head:][-keep:]
            del self._tail[: max(0, len(self._tail) - keep)]
        return len(data)
