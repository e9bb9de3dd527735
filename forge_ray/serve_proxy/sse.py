"""Reading a server-sent event stream that passes by, in whatever pieces it comes."""

from __future__ import annotations


class SseData:
    """Cuts a byte stream into the `data:` payloads of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the `data:` lines that `chunk` completes, in order."""
        *lines, self._rest = (self._rest + chunk).split(b"\n") if self._rest else chunk.split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
