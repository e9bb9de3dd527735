"""Connecting to Ray: a submitted job's cluster, a running local one, or one of this run's own.

Bad addresses end in one line before Ray is asked, because Ray's own answer is an assertion or a long wait. A cluster that this
process started is ended with it; one that it found is left alone.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ray import ray_env
from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import guard, resources

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Patience with a server that has taken the connection."""

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
"""A client's preface and an empty SETTINGS frame (RFC 9113, 3.4)."""
_SETTINGS = b"\4"

STARTS = 3
"""Tries to start a local cluster."""


@dataclass(frozen=True)
class Cluster:
    """The connection: whether this process owns the cluster, and whether Serve runs in HAProxy mode there."""

    owned: bool
    address: str
    haproxy: bool
    session: str | None = None
    """Ray's session directory, of a cluster of one's own."""

    def ended_well(self) -> None:
        """Nobody will want this run's Ray logs: the guard removes them once the last process is gone."""
        if self.session is not None:
            guard.forget(self.session)


def find(config: Config) -> str | None:
    """Address of the cluster to join (`host:port`), or None: start one. Raises `UserError` for an address that cannot work."""
    where, address = ("ray.address", config.ray.address) if config.ray.address else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))
    if address == "local":
        return None
    if not address or address == "auto":
        running = _local_cluster()
        if running is None and address == "auto":
            raise UserError("no Ray cluster runs on this machine", where=where, fix="run `ray start --head`, or leave the address out")
        return running
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"{address} is a dashboard address, which only `ray job submit` understands",
            where=where,
            fix="unset RAY_ADDRESS, or set it to the cluster's host:6379",
        )
    if address.startswith("ray://"):
        raise UserError(
            f"{address} is a Ray Client address, which cannot serve",
            where=where,
            fix="submit the run with `ray job submit`, or give host:6379",
        )
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise UserError(f"{address!r} is no host:port", where=where, fix="give the cluster's host:6379")
    if not _answers(host, int(port)):
        raise UserError(f"no cluster answers at {address}", where=where, fix="start it, or unset the address to start a local one")
    return address


def connect(config: Config, *, extra_environment: dict[str, str] | None = None) -> Cluster:
    """`ray.init` for this run. Sets the cluster variables before Ray is imported when it starts a cluster of its own."""
    address = find(config)
    environment = {**ray_env.worker(), **(extra_environment or {})}
    runtime_env = {"env_vars": environment}
    if address is None:
        ray_env.apply()
        _serve_ports(config.proxy.port)
        # Ray's sockets lie below its temporary directory and must stay under 108 characters.
        temporary = Path("/tmp") if len(tempfile.gettempdir()) > 40 else Path(tempfile.gettempdir())
        os.environ.setdefault("RAY_TMPDIR", str(temporary))
    # Actors without a CPU of their own are what a run is made of; Ray would warn of their number into the run's table.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "PYTHON worker processes have been started")
    import ray

    if address is None:
        guard.mark()
        information = _start(config, runtime_env).address_info
        session = information["session_dir"]
        # Where Serve keeps what belongs to HAProxy, beside Ray's own directory.
        base = os.environ.get("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", "/tmp/haproxy-serve")
        guard.start(session, os.path.join(base, information["node_id"]))
        log.info("a cluster of this run's own: %s CPUs, its logs below %s", ray.cluster_resources().get("CPU"), session)
        return Cluster(owned=True, address="local", haproxy=ray_env.haproxy(), session=session)
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, runtime_env=runtime_env)
    return Cluster(owned=False, address=address, haproxy=_cluster_haproxy())


def _start(config: Config, runtime_env: dict[str, Any]) -> Any:
    """A new local cluster. Ray gives a node 30 s to come up, which a busy machine may miss: then it is tried again."""
    import ray

    for left in reversed(range(STARTS)):
        try:
            return ray.init(
                address="local",
                num_cpus=resources.own_cpus(config),
                include_dashboard=config.ray.dashboard,
                object_store_memory=config.ray.object_store_mb * 2**20,
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env=runtime_env,
            )
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start in time, trying again: %s", error)
            ray.shutdown()
    raise AssertionError("unreachable")


def _cluster_haproxy() -> bool:
    """What the cluster itself was started with: asked of a worker without our runtime environment's help."""
    import ray

    @ray.remote(num_cpus=0)
    def ask() -> bool:
        return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"

    return ray.get(ask.remote(), timeout=60)


def _local_cluster() -> str | None:
    """`host:port` of the cluster that `ray start` left its address for, if it still answers."""
    for directory in dict.fromkeys((os.environ.get("RAY_TMPDIR", "/tmp"), "/tmp")):
        file = Path(directory) / "ray" / "ray_current_cluster"
        if file.is_file():
            address = file.read_text().strip()
            host, _, port = address.rpartition(":")
            if port.isdigit() and _answers(host, int(port)):
                return address
    return None


def _answers(host: str, port: int) -> bool:
    """Whether something that may be Ray's GCS listens there: it speaks HTTP/2 and greets with a SETTINGS frame. What else may answer would
    have Ray wait for minutes."""
    try:
        with socket.create_connection((host, port), timeout=3) as connection:
            if os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):
                return True  # it says nothing without a certificate
            connection.sendall(_GREETING)
            connection.settimeout(ANSWER_S)
            frame = b""
            while len(frame) < 4 and (more := connection.recv(9)):
                frame += more
            return frame[3:4] == _SETTINGS
    except OSError:
        return False


def _serve_ports(port: int) -> None:
    """Give this cluster's replicas a port range of their own: two clusters on one host would share Serve's defaults."""
    block = port % 97
    for name, first, size in (("HTTP", 20000, 100), ("GRPC", 10000, 80)):
        os.environ.setdefault(f"RAY_SERVE_DIRECT_INGRESS_MIN_{name}_PORT", str(first + block * size))
        os.environ.setdefault(f"RAY_SERVE_DIRECT_INGRESS_MAX_{name}_PORT", str(first + block * size + size - 1))
    os.environ.setdefault("RAY_SERVE_HAPROXY_METRICS_PORT", str(9200 + block))
    os.environ.setdefault("RAY_SERVE_HAPROXY_STATS_PORT", str(8500 + block))
