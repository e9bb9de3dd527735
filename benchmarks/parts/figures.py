"""The arithmetic of the benchmarks: percentiles, CPU time of processes, growth, verdicts. Pure but for `cpu_seconds`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 … 1) of all values do not exceed. NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Least-squares slope of (x, y) points; 0 where all x are the same."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """User and system time of each process so far; a process that has ended is left out. Resolution 10 ms."""
    import psutil

    found = {}
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[pid] = times.user + times.system
    return found


def spent(before: dict[int, float], after: dict[int, float]) -> float:
    """CPU seconds between two readings. A process that began in between counts whole; one that ended, up to the first reading only."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


@dataclass(frozen=True)
class Measured:
    """One server under one load."""

    latencies: list[float]
    """Seconds, per call."""
    first: list[float]
    """Seconds to the first byte of the body, per call."""
    cpu_s: float
    """Of all processes that serve, for all calls."""
    log_bytes: int = 0
    """Appended to the call log."""
    new_tokens: int = 0
    """Prompt tokens that the call before did not have, and sampled ones."""

    @property
    def calls(self) -> int:
        return len(self.latencies)

    @property
    def p50(self) -> float:
        """Milliseconds."""
        return percentile(self.latencies, 0.5) * 1e3

    @property
    def p95(self) -> float:
        """Milliseconds."""
        return percentile(self.latencies, 0.95) * 1e3

    @property
    def ttft(self) -> float:
        """Median, milliseconds."""
        return percentile(self.first, 0.5) * 1e3

    @property
    def cpu(self) -> float:
        """Milliseconds per call."""
        return self.cpu_s / self.calls * 1e3 if self.calls else math.nan

    def plus(self, other: Measured) -> Measured:
        """Both rounds together."""
        return Measured(
            self.latencies + other.latencies,
            self.first + other.first,
            self.cpu_s + other.cpu_s,
            self.log_bytes + other.log_bytes,
            self.new_tokens + other.new_tokens,
        )


@dataclass(frozen=True)
class Verdict:
    """One target, met or not."""

    what: str
    value: float
    bound: float
    unit: str = "ms"

    @property
    def met(self) -> bool:
        return self.value <= self.bound  # not of NaN

    def __str__(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'}  {self.what}: {self.value:.2f} {self.unit} (bound {self.bound:.2f})"


LATENCY_MS, LATENCY_SHARE, CPU_SHARE, FIRST_MS, GATEWAY_SHARE = 2.0, 0.05, 0.05, 2.0, 0.25


def verdicts(name: str, plain: Measured, floor: Measured, ours: Measured, *, streamed: bool) -> list[Verdict]:
    """What recording may add over `floor`: vLLM's app as Serve serves it. Shares are of `plain`, the app without Serve."""
    bound = max(LATENCY_MS, LATENCY_SHARE * plain.p50)
    found = [
        Verdict(f"{name}: added p50", ours.p50 - floor.p50, bound),
        Verdict(f"{name}: added CPU per call", ours.cpu - floor.cpu, CPU_SHARE * plain.cpu),
    ]
    if streamed:
        found.append(Verdict(f"{name}: added time to first token", ours.ttft - floor.ttft, FIRST_MS))
    return found


def against_gateway(name: str, plain: Measured, ours: Measured, gateway: Measured) -> Verdict:
    """All that Serve and recording add, against what a gateway adds that records nothing."""
    return Verdict(f"{name}: CPU added, of what LiteLLM adds", ours.cpu - plain.cpu, GATEWAY_SHARE * (gateway.cpu - plain.cpu))


def growth(name: str, short: Measured, long: Measured) -> Verdict:
    """Bytes logged per call must follow the new tokens: with a long history hardly more per new token than with a short one."""
    per_token = [one.log_bytes / one.new_tokens for one in (short, long)]
    return Verdict(f"{name}: bytes logged per new token, against the shortest history", per_token[1] / per_token[0], 1.1, "x")
