"""File-system and process isolation by bubblewrap: the same paths in every rollout, a read-only system, a process table of its own.

Inside there are the host's system directories (read-only), the workspace at the task's working directory, HOME at `/home/agent`, a
private `/tmp` and `/dev/shm` on disk, and what a command names as visible; nothing else of the host: not the run, not the task's
tests or solution, not other rollouts (where they lie below a system directory they are covered up). The command is the init of its
own process table, so its end is the end of everything it started, and the kernel lets bubblewrap see that end only afterwards; the
table dies with bubblewrap, and bubblewrap with the process that started it. Capabilities are dropped, also for root, and what root
could do without them to the kernel's switches and the system's secrets is barred (`masking`). The network is the host's, since the
proxy listens on its loopback.

Bubblewrap follows the thread that starts it: start it from a thread that lives as long as the sandbox (an event loop's).
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from forge_ray.sandboxes import masking
from forge_ray.sandboxes.processes import MARKER

HOME = "/home/agent"
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt", "nix", "sys")
"""Directories of the host's root that are visible, read-only."""

_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox")
_HARDENED = (*_NAMESPACES, "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL")


_PROBE = """
[ $$ = 1 ] || { echo no process table of its own >&2; exit 1; }
: > /workspace/written || { echo the workspace cannot be written >&2; exit 1; }
if (: > /usr/.forge-ray-probe) 2>/dev/null; then echo the system can be written >&2; exit 1; fi
for switch in /proc/sys/kernel/core_pattern /proc/sys/vm/overcommit_memory /proc/sys/fs/file-max /proc/sysrq-trigger; do
  if (: >> $switch) 2>/dev/null; then echo $switch can be written >&2; exit 1; fi
done
"""
"""Opens, and writes nothing but one file of the workspace."""


class Unavailable(Exception):
    """Bubblewrap does not work here; the message says why, in one line."""


@functools.cache
def probe() -> tuple[str, ...]:
    """The command and options with which bubblewrap works on this machine: tried once per process. Raises `Unavailable`."""
    program = shutil.which("bwrap")
    if program is None:
        raise Unavailable("bubblewrap is not installed")
    problem = ""
    with tempfile.TemporaryDirectory(prefix="forge-ray-probe-") as folder:
        # Root may make namespaces as it is, or, in a container, only inside a user namespace. Anybody else gets one anyway.
        for extra in ((), ("--unshare-user",)):
            base = (program, *_HARDENED, *extra)
            options = arguments({folder: "/workspace"}, shm=folder, cwd="/workspace", visible=())
            command = [*base, *options, "sh", "-c", _PROBE]
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Unavailable(f"bubblewrap does not start ({error})") from None
            if done.returncode == 0 and os.path.exists(f"{folder}/written"):
                return base
            problem = problem or " ".join(done.stderr.decode(errors="replace").split()) or f"exit code {done.returncode}"
    raise Unavailable(f"bubblewrap does not work here ({problem[:200]})")


def counts_processes() -> bool:
    """Whether RLIMIT_NPROC counts a sandbox's processes alone: in a user namespace of its own it does, but never for the host's root."""
    return os.geteuid() != 0


@functools.cache
def _system() -> tuple[str, ...]:
    """Options that show the host's system."""
    options: list[str] = []
    for name in SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    # Name resolution's file is often a link to below /run, which is not visible.
    resolver = os.path.realpath("/etc/resolv.conf")
    if not _is_system(resolver) and os.path.isfile(resolver):
        options += ["--ro-bind", resolver, resolver]
    options += ["--proc", "/proc", *masking.kernel(), "--dev", "/dev"]
    return (*options, "--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp")


def _is_system(path: str) -> bool:
    return path.split("/")[1] in SYSTEM


def interpreter() -> tuple[str, ...]:
    """The Python that runs us, without its virtual environment, where it is no part of the system."""
    prefix = os.path.realpath(sys.base_prefix)
    return () if _is_system(prefix) or not os.access(prefix, os.R_OK | os.X_OK) else (prefix,)


def arguments(binds: Mapping[str, str], *, shm: str, cwd: str, visible: Sequence[str], hidden: Sequence[str] = ()) -> list[str]:
    """Options of one command: `binds` maps host directories to their places inside (writable), `shm` becomes /dev/shm. `hidden` directories
    are empty inside where they lie below a visible one (a run or a checkout below /opt or /usr)."""
    options = [*_system(), *masking.secrets()]
    for path in dict.fromkeys(os.path.realpath(path) for path in hidden):
        if _is_system(path) and os.path.isdir(path):
            options += ["--tmpfs", path]
    for source, place in binds.items():
        options += ["--bind", source, place]
    options += ["--bind", shm, "/dev/shm"]
    shown: set[str] = set()
    for path in (*interpreter(), *visible):
        for place in (os.path.abspath(path), os.path.realpath(path)):
            if place not in shown and not _is_system(place):
                shown.add(place)
                options += ["--ro-bind", place, place]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", cwd, "--unsetenv", MARKER, "--"]
