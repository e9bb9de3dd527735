"""Resource limits of a sandbox's commands, and the signs by which one is known to have acted.

Each is a limit of a single process (setrlimit), inherited by all it starts, but `processes`, which counts the whole sandbox.

Memory is RLIMIT_DATA: private writable memory, the kernel's nearest notion to what a program allocates. The address space (RLIMIT_AS) would
kill every JavaScript engine at its start, since those reserve many times the memory that they use.
"""

from __future__ import annotations

import re
import resource
import signal
from dataclasses import dataclass

from forge_ray.config import Sandbox as SandboxConfig
from forge_ray.sandboxes.sandbox import Limit

_CPU_GRACE_S = 5
"""Seconds of CPU time between SIGXCPU and SIGKILL."""

_OUT_OF_MEMORY = re.compile(
    rb"MemoryError|bad_alloc|[Oo]ut of memory|[Cc]annot allocate memory|memory exhausted"
    rb"|memory allocation of \d+ bytes failed|heap out of memory"
)


def oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has killed so far, here; 0 where it does not say."""
    for file in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            with open(file, "rb") as opened:
                found = re.search(rb"^oom_kill (\d+)$", opened.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


@dataclass(frozen=True)
class Limits:
    """None means no limit of ours."""

    memory_mb: int | None = None
    cpu_seconds: int | None = None
    processes: int | None = None
    open_files: int | None = None
    file_mb: int | None = None

    @classmethod
    def of(cls, config: SandboxConfig, memory_mb: int | None = None) -> Limits:
        """The config's limits, with a task's memory limit over the default."""
        return cls(memory_mb or config.memory_mb, config.cpu_seconds, config.processes, config.open_files, config.file_mb)

    def rlimits(self) -> dict[int, tuple[int, int]]:
        """Resource number -> (soft, hard), never above the hard limits of this process. Without `processes`."""
        wanted: dict[int, tuple[int, int]] = {resource.RLIMIT_CORE: (0, 0)}
        if self.memory_mb is not None:
            wanted[resource.RLIMIT_DATA] = (self.memory_mb << 20, self.memory_mb << 20)
        if self.cpu_seconds is not None:
            wanted[resource.RLIMIT_CPU] = (self.cpu_seconds, self.cpu_seconds + _CPU_GRACE_S)
        if self.open_files is not None:
            wanted[resource.RLIMIT_NOFILE] = (self.open_files, self.open_files)
        if self.file_mb is not None:
            wanted[resource.RLIMIT_FSIZE] = (self.file_mb << 20, self.file_mb << 20)
        capped = {}
        for kind, (soft, hard) in wanted.items():
            ceiling = resource.getrlimit(kind)[1]
            if ceiling != resource.RLIM_INFINITY:
                soft, hard = min(soft, ceiling), min(hard, ceiling)
            capped[kind] = (soft, hard)
        return capped

    def shell(self, *, count_processes: bool) -> str:
        """A shell command that sets them, and fails where it cannot."""
        letters = {
            resource.RLIMIT_CORE: ("c", 512),
            resource.RLIMIT_DATA: ("d", 1024),
            resource.RLIMIT_CPU: ("t", 1),
            resource.RLIMIT_NOFILE: ("n", 1),
            resource.RLIMIT_FSIZE: ("f", 512),
        }
        commands = []
        for kind, values in self.rlimits().items():
            letter, unit = letters[kind]
            commands += [f"ulimit -{which} -{letter} {value // unit}" for which, value in zip("SH", values, strict=True)]
        if count_processes and self.processes is not None:
            # -u in bash, -p in dash and busybox.
            commands.append(f"{{ ulimit -u {self.processes} 2>/dev/null || ulimit -p {self.processes}; }}")
        return " && ".join(commands)

    def supervisor(self) -> str:
        """The same for supervisor.py."""
        return ",".join(f"{kind}:{soft}:{hard}" for kind, (soft, hard) in self.rlimits().items())

    def recognise(self, exit_code: int, log_end: bytes, *, oom_killed: bool = False, cpu_seconds: float = 0.0) -> Limit | None:
        """Which limit most likely ended a command that was not killed by us. An honest guess: see `RunResult.limit`. `oom_killed`: the
        kernel's out-of-memory killer acted meanwhile, here or elsewhere; `cpu_seconds`: CPU time that the command used in all."""
        if exit_code == 0:
            return None
        if exit_code == 128 + signal.SIGXCPU:
            return "cpu"
        if exit_code == 128 + signal.SIGXFSZ:
            return "file"
        if exit_code == 128 + signal.SIGKILL:
            # Somebody's; a program may kill itself, too.
            if oom_killed:
                return "memory"
            if self.cpu_seconds is not None and cpu_seconds >= self.cpu_seconds + _CPU_GRACE_S:
                return "cpu"  # it outlived SIGXCPU
        return "memory" if self.memory_mb is not None and _OUT_OF_MEMORY.search(log_end) else None
