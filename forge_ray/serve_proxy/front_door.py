"""Until Serve's door leads to every replica.

Serve calls a deployment healthy before its HTTP side has heard of every replica. HAProxy sends a session to the replica that its path
hashes to among those it knows, so a session that began a moment too early would change its replica, and its limits, which are counted
there, would begin again.
"""

from __future__ import annotations

import itertools
import time

import httpx

from forge_ray.errors import ForgeRayError
from forge_ray.serve_proxy.client import ProxyClient
from forge_ray.serve_proxy.probes import REPLICA
from forge_ray.serve_proxy.sessions import Sessions

WAIT_S = 120.0
"""Patience with Serve's HTTP side, as with its start (`RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S`)."""


class DoorClosed(ForgeRayError):
    """Requests do not reach every replica."""


def wait(client: ProxyClient, sessions: Sessions, timeout_s: float = WAIT_S) -> None:
    """Ask by the paths of many sessions until `client.replicas` different replicas have answered. Raises `DoorClosed`."""
    deadline, reached, problem = time.monotonic() + timeout_s, set[str](), ""
    for number in itertools.count():
        url = client.url(sessions.issue(f"door-{number}", "train")) + "/health"
        try:
            # Not on one connection: HAProxy's old process serves those that were there before it learned of a replica.
            answer = httpx.get(url, timeout=30, trust_env=False)
        except httpx.TransportError as error:
            problem = repr(error)
        else:
            if replica := answer.headers.get(REPLICA):
                reached.add(replica)
            problem = f"HTTP {answer.status_code}"
        if len(reached) >= client.replicas:
            return
        if time.monotonic() > deadline:
            raise DoorClosed(f"{client.base_url} leads to {len(reached)} of {client.replicas} replicas after {timeout_s:.0f} s ({problem})")
        time.sleep(0.05)
