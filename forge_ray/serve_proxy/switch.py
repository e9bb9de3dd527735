"""Switch: every replica goes over to new weights, or none does.

    prepare everywhere → decide (the run's `weights/current.json` names the version) → commit everywhere

The decision is one durable write. Before it, whatever fails leaves all replicas and the run at the old version; after it, whatever fails
is repeated until all serve the new one, and a replica that starts loads it before it is healthy. A replica that does not get through a
phase in time is killed and replaced: one that hangs would hold up the run, and one that comes back late would serve old weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forge_ray.errors import ForgeRayError
from forge_ray.serve_proxy.client import ProxyUnavailable

if TYPE_CHECKING:
    from forge_ray.serve_proxy.client import ProxyClient

log = logging.getLogger(__name__)

REPLACED = 2
"""How often late replicas are replaced in one phase, before it is given up."""
START_S = 900.0
"""Time that the successor of a replaced one may take to start."""


async def switch(
    client: ProxyClient, weights: Any, version: str, *, timeout_s: float, pause: str = "keep", decide: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Bring all replicas of `client` to `version`; the arguments are those of `ProxyClient.update_weights`.

    Returns `{"version", "replicas", "seconds", "prepare_s", "paused_s", "replaced"}`: wall seconds of all of it and of the first phase, the
    longest time from pause to resume of a replica (None where none paused), and the ids of replicas that were killed for being late.
    """
    began = time.monotonic()
    replaced: list[str] = []
    try:
        # A list, because a reference that is an argument of its own would be resolved on the way.
        await _everywhere(client, "prepare_weights", version, [weights], timeout_s=timeout_s, replaced=replaced)
    except BaseException:
        with contextlib.suppress(ForgeRayError, TimeoutError):
            await client.all("discard_weights", timeout_s=5.0)
        raise
    prepared = time.monotonic()
    if decide is not None:
        await asyncio.to_thread(decide)
    reports = await _committed(client, version, pause, timeout_s, replaced)
    paused = [report["paused_s"] for report in reports if report["paused_s"] is not None]
    return {
        "version": version,
        "replicas": len(reports),
        "seconds": time.monotonic() - began,
        "prepare_s": prepared - began,
        "paused_s": max(paused, default=None),
        "replaced": replaced,
    }


async def _committed(client: ProxyClient, version: str, pause: str, timeout_s: float, replaced: list[str]) -> list[dict[str, Any]]:
    from ray.exceptions import RayTaskError

    end = time.monotonic() + timeout_s + START_S
    while True:
        try:
            reports = await _everywhere(client, "commit_weights", version, pause, timeout_s=timeout_s, replaced=replaced)
            if all(report["version"] == version for report in reports):
                return reports
        except RayTaskError as error:
            # An engine that failed under the update: its replica is unhealthy now, and Serve starts another.
            if time.monotonic() > end:
                raise
            log.warning("a replica failed to switch to version %s and is replaced: %s", version, " ".join(str(error).split())[-300:])
        await asyncio.sleep(0.3)


async def _everywhere(
    client: ProxyClient, method: str, version: str, *arguments: Any, timeout_s: float, replaced: list[str]
) -> list[dict[str, Any]]:
    """The answers of all replicas to `method`; those that are late are replaced, and their successors asked."""
    patience = timeout_s
    for left in reversed(range(REPLACED + 1)):
        try:
            return await client.all(method, version, *arguments, timeout_s=patience)
        except ProxyUnavailable as error:
            if not left or not error.late:
                raise
            for replica in sorted(error.late):
                log.error("replica %s did not %s %s within %.0f s and is replaced", replica, method.replace("_", " "), version, patience)
                await client.replace(replica)
            replaced.extend(sorted(error.late))
            patience = timeout_s + START_S
    raise AssertionError("unreachable")
