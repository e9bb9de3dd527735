"""The files of the call log: how they are named, and how it is known that one is not written any more.

A replica incarnation writes `<replica>.jsonl` and, each time a file has grown to its bound, goes on in `<replica>.0001.jsonl`,
`<replica>.0002.jsonl` … Only the newest of them is ever written, and its writer holds an exclusive lock on it (flock), which ends with the
process however that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?P<replica>.+?)(?:\.(?P<number>\d{4,}))?\.jsonl")


@dataclass(frozen=True, order=True)
class Segment:
    """One file of JSON lines. They sort by replica, then in the order in which they were written."""

    replica: str
    number: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name


def file_name(replica: str, number: int) -> str:
    """The name of a replica's segment `number`, counted from 0."""
    return f"{replica}.jsonl" if number == 0 else f"{replica}.{number:04d}.jsonl"


def segments(directory: Path) -> list[Segment]:
    """Every segment in `directory`, sorted; none where there is no such directory."""
    found = []
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None and not name.startswith("."):
            found.append(Segment(match["replica"], int(match["number"] or 0), directory / name))
    return sorted(found)


def claim(file: int) -> None:
    """Mark the open file as being written by this process. On a file system without locks nothing happens."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return


def claimed(path: Path) -> bool:
    """Whether a living process writes `path`. Where that cannot be found out the answer is yes; a file that is gone is not written."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def writing(found: Collection[Segment], *, alive: Collection[str] = (), quiet_s: float = 0.0, now: float = 0.0) -> dict[str, bool]:
    """By replica of `found`: whether its newest segment may still be written.

    Locks may be known to one machine only (some network file systems), so a replica in `alive`, or one whose newest segment changed within
    `quiet_s` seconds before `now` (Unix seconds), counts as writing whatever its lock says.
    """
    newest = {segment.replica: segment for segment in sorted(found)}
    result = {}
    for replica, segment in newest.items():
        try:
            changed = segment.path.stat().st_mtime
        except FileNotFoundError:
            result[replica] = replica in alive
            continue
        result[replica] = replica in alive or (quiet_s > 0 and now - changed < quiet_s) or claimed(segment.path)
    return result
