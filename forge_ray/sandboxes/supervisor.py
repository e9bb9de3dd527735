"""Keeps a command's whole family together where there is no process table of its own to do it: run as a script, standard library only.

    python -I -S supervisor.py PARENT LIMITS DIRECTORY COMMAND…

It makes itself the reaper of all its descendants, so that a daemon which forks twice and leaves session and group becomes its child
and not init's; when the command ends, when it is told to (SIGTERM), or when PARENT dies, it kills every descendant, and it ends
only after the last one has. stdout is a pipe to the parent: `ready` before the command starts, `end` after the last descendant is
gone. The command's stdout and stderr are its stderr. LIMITS is `number:soft:hard,…` for setrlimit. The exit code is the shell's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class _Stop(BaseException):
    """SIGTERM came."""


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stop


def _start(limits: str, directory: str, command: list[str]) -> None:
    """The child's side: never returns."""
    code = 126
    try:
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two, and that is inherited
            signal.signal(number, signal.SIG_DFL)
        for entry in filter(None, limits.split(",")):
            kind, soft, hard = map(int, entry.split(":"))
            resource.setrlimit(kind, (soft, hard))
        os.chdir(directory)
        os.write(1, b"ready\n")
        os.dup2(2, 1)
        os.execvp(command[0], command)
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # a script without its first line
            os.execv("/bin/sh", ["sh", *command])
        code = 127 if error.errno == errno.ENOENT else 126
        os.write(2, f"{command[0]}: {error}\n".encode(errors="surrogateescape"))
    finally:
        os._exit(code)


def _descendants() -> list[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    known = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in known} - known
        known |= more
        grown = bool(more)
    return sorted(known - {os.getpid()})


def _kill_all() -> None:
    while True:
        for pid in _descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def main() -> int:
    parent, limits, directory, *command = sys.argv[1:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    code = 143
    try:
        signal.signal(signal.SIGTERM, _stop)
        if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) or prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
            os.write(2, b"supervisor: prctl failed\n")
            return 126
        if os.getppid() != int(parent):
            return code
        child = os.fork()
        if child == 0:
            _start(limits, directory, command)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                code = 128 - code if code < 0 else code
                break
    except _Stop:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill_all()
    os.write(1, b"end\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
