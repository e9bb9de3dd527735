"""What of this machine a run needs: packages, directories, isolation, Ray, a port, memory."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from forge_ray.cli.finding import Finding
from forge_ray.config import Config
from forge_ray.errors import UserError

ENDING_S = 30.0
"""How long a cluster may take to end whose driver was killed."""


def packages() -> Finding:
    missing = [name for name in ("ray", "torch", "transformers", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "packages",
            f"{', '.join(missing)} cannot be imported",
            False,
            fix="run `make env`, or install forge-ray with the cpu or gpu extra",
        )
    return Finding("packages", "ray, torch, transformers, vllm")


def runs(config: Config) -> Finding:
    parent, problem = makeable(Path(config.runs))
    run = Path(config.runs) / config.name
    if problem is None and os.path.lexists(run) and not run.is_dir():
        problem = f"{run} is no directory"
    if problem is not None:
        return Finding("runs", problem, False, fix="set runs to a directory of yours")
    free = shutil.disk_usage(parent).free / 2**30
    return Finding("runs", f"{config.runs}, {free:.0f} GiB free", free > 1, fix="free some space or set runs elsewhere")


def store(config: Config) -> Iterator[Finding]:
    """Only one elsewhere: that of the run directory is as good as that."""
    where = config.store.location
    if where is None:
        return
    problem = makeable(Path(where))[1] if "://" not in where else None
    if "://" in where:
        from forge_ray.errors import ForgeRayError
        from forge_ray.job import store
        from forge_ray.run_dir import RunDir

        try:
            store.location(config, RunDir(Path(config.runs) / config.name)).probe()
        except ForgeRayError as error:
            problem = error.problem if isinstance(error, UserError) else str(error)
    fix = "correct store.location, or the credentials in the environment"
    yield Finding("store", problem or where, problem is None, fix=fix)


def makeable(directory: Path) -> tuple[Path, str | None]:
    """The part of `directory` that exists, and why the rest cannot be made or written to; None if it can."""
    parent = directory
    while not os.path.lexists(parent) and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        return parent, f"{parent} is no directory"
    return parent, None if os.access(parent, os.W_OK | os.X_OK) else f"{directory} cannot be written"


def isolation(config: Config) -> tuple[Literal["bubblewrap", "none"], str]:
    """What the sandboxes will have, and why not more."""
    from forge_ray.sandboxes.bubblewrap import Unavailable, probe

    if config.sandbox.isolation == "none":
        return "none", ""
    try:
        probe()
    except Unavailable as error:
        return "none", str(error)
    return "bubblewrap", ""


def sandbox(config: Config) -> Finding:
    kind, reason = isolation(config)
    if config.sandbox.directory is not None:
        directory, problem = makeable(Path(config.sandbox.directory))
        if problem is None and str(directory) == config.sandbox.directory and directory.stat().st_uid != os.geteuid():
            problem = f"{directory} is not a directory of this user"
        if problem is not None:
            return Finding("sandbox.directory", problem, False, fix="name a directory of yours")
    if kind == "bubblewrap" or config.sandbox.isolation == "none":
        return Finding("sandbox", f"process, isolation {kind}")
    fix = "install bubblewrap (apt-get install bubblewrap) and allow user namespaces"
    if config.sandbox.isolation == "bubblewrap":
        return Finding("sandbox", f"no file-system isolation: {reason}", False, fix=fix)
    return Finding("sandbox", f"no file-system isolation, harnesses see this machine's files: {reason}", False, blocking=False, fix=fix)


def cluster(config: Config, training: bool) -> Iterator[Finding]:
    from forge_ray import ray_env
    from forge_ray.job import resources
    from forge_ray.job.cluster import find

    try:
        address = find(config)
    except UserError as error:
        yield Finding(error.where or "ray", error.problem, False, fix=error.fix or "")
        return
    if address is None:
        yield Finding("ray", "a cluster of this run's own will be started, with Serve's HAProxy mode")
        if (short := resources.shortage(config, resources.own(config), training=training)) is not None:
            yield Finding(short.where or "ray", short.problem, False, fix=short.fix or "")
        return
    yield Finding("ray", f"joins the cluster at {address}")
    if not ray_env.haproxy():
        yield Finding(
            "ray", "Serve's HAProxy mode is not set in this shell (the run works, slower)", False, blocking=False,
            fix="start Ray with the variables of cluster/ray.env",
        )  # fmt: skip


def joins(config: Config) -> bool:
    """Whether the run would join a running cluster: Serve may hold the port there already, and deploying says what is wrong."""
    from forge_ray.job.cluster import find

    try:
        return find(config) is not None
    except UserError:
        return False


def await_port(config: Config, told: Callable[[str], None]) -> None:
    """Wait until the port is free, for `ENDING_S` at most: a run that was killed may be resumed while the cluster that it had is ending."""
    deadline = time.monotonic() + ENDING_S
    found, last = port(config), None
    while not found.ok and time.monotonic() < deadline:
        if found.state != last:
            last = found.state
            told(f"proxy.port: {last}; waiting for what held it to end")
        time.sleep(0.2)
        found = port(config)


def port(config: Config) -> Finding:
    host = "127.0.0.1" if config.proxy.host in ("0.0.0.0", "::") else config.proxy.host
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, config.proxy.port))
        except OSError as error:
            return Finding(
                "proxy.port", f"{host}:{config.proxy.port} cannot be used ({error.strerror})", False, fix="give another: proxy.port=18701"
            )
    return Finding("proxy.port", f"{host}:{config.proxy.port} is free")


def memory() -> Finding:
    import psutil

    available = psutil.virtual_memory().available / 2**30
    return Finding("memory", f"{available:.0f} GiB available", available >= 6, blocking=False, fix="the quickstart needs about 6 GiB")
