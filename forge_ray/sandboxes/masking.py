"""What of the host's system a sandbox must not have although its directory is shown: the kernel's switches, and the system's secrets.

Root keeps the rights of root's files without a single capability: it may write the sysctls, and read /etc/shadow. So /proc's entries
that are the machine's and not a process's are made read-only, whichever this kernel has, and what another user of this machine could
not read in /etc is covered up.
"""

from __future__ import annotations

import functools
import os
import stat

SECRET_TREES = ("/etc", "/usr/local/etc")
"""Trees of the system in which files with keys and passwords lie."""

_SECRET_PROC = ("acpi", "asound", "kcore", "keys", "kmsg", "latency_stats", "sched_debug", "scsi", "slabinfo", "timer_list", "vmallocinfo")
"""Entries of /proc that containers hide as well: they tell of the host's kernel, not of the sandbox."""
_SECRET_SYS = ("/sys/firmware", "/sys/kernel/debug", "/sys/kernel/tracing", "/sys/kernel/security")


def kernel() -> list[str]:
    """Options that make the machine's part of a fresh /proc read-only, or hide it; to stand after `--proc /proc`."""
    options: list[str] = []
    with os.scandir("/proc") as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.isdigit() or entry.is_symlink():
                continue
            if entry.name in _SECRET_PROC:
                options += _covered(entry.path, directory=entry.is_dir())
            elif entry.is_dir() or entry.stat().st_mode & 0o222:
                options += ["--ro-bind", entry.path, entry.path]
    for path in _SECRET_SYS:
        if os.path.isdir(path):
            options += _covered(path, directory=True)
    return options


def secrets() -> list[str]:
    """Options that cover up what this user can read below `SECRET_TREES` and others cannot."""
    changed = tuple(os.stat(tree).st_mtime_ns if os.path.isdir(tree) else 0 for tree in SECRET_TREES)
    return [option for path, directory in _private(changed) for option in _covered(path, directory=directory)]


@functools.lru_cache(maxsize=1)
def _private(_changed: tuple[int, ...]) -> list[tuple[str, bool]]:
    """(path, whether it is a directory); looked for anew when an entry of a tree's top has changed, as a new password changes it."""
    found: list[tuple[str, bool]] = []
    pending = [tree for tree in SECRET_TREES if os.path.isdir(tree)]
    while pending:
        try:
            entries = sorted(os.scandir(pending.pop()), key=lambda entry: entry.name)
        except OSError:  # nor can the sandbox
            continue
        for entry in entries:
            if entry.is_symlink():
                continue
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except FileNotFoundError:  # a file that another program had there for a moment
                continue
            if stat.S_ISDIR(mode):
                if mode & stat.S_IXOTH:
                    pending.append(entry.path)
                elif os.access(entry.path, os.X_OK):
                    found.append((entry.path, True))
            elif not mode & stat.S_IROTH and os.access(entry.path, os.R_OK):
                found.append((entry.path, False))
    return found


def _covered(path: str, *, directory: bool) -> list[str]:
    # A device on a bind without devices cannot be opened by anybody.
    return ["--tmpfs", path, "--remount-ro", path] if directory else ["--ro-bind", "/dev/null", path]
