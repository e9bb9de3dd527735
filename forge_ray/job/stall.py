"""A run that waits for room that its cluster does not have says so.

Ray itself waits for ever, and silently, for a node that could take a task, an actor or a group of train workers. Nothing may go on for
`QUIET_S` for many good reasons; where Ray has demand that it cannot place at the same time, one line names it, once for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from forge_ray.report.progress import Progress

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""Without progress for so long, Ray is asked."""
PERIOD_S = 10.0
_FREE = "; free: "


def waiting() -> str | None:
    """What the connected cluster cannot place at present, in one line; None if there is nothing. Asks the GCS (blocking, milliseconds)."""
    import ray
    import ray._raylet
    from ray._private import state
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    raylet: Any = ray._raylet  # compiled: no checker sees into it
    now = get_cluster_resource_state(raylet.GcsClient(address=ray.get_runtime_context().gcs_address))
    parts = [f"{one.count} x {_shape(one.request.resources_bundle)}" for one in now.pending_resource_requests]
    parts += [
        "a group of " + " + ".join(_shape(one.resources_bundle) for one in gang.requests) for gang in now.pending_gang_resource_requests
    ]
    if not parts:
        return None
    actors = sorted({actor["Name"] or actor["ActorClassName"] for actor in state.actors().values() if actor["State"] == "PENDING_CREATION"})
    every, free = ray.cluster_resources(), ray.available_resources()
    rest = ", ".join(f"{free.get(name, 0):g} of {every[name]:g} {name}" for name in ("CPU", "GPU") if name in every)
    who = f" (actors that wait: {', '.join(actors)})" if actors else ""
    return f"{', '.join(parts)}{who}{_FREE}{rest or 'nothing'}"


def _shape(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {value:g}" for name, value in sorted(resources.items())) + "}"


@contextlib.asynccontextmanager
async def watch(progress: Progress) -> AsyncIterator[None]:
    """Look after the run while the body runs. Ray must be connected, and stays connected until this has ended."""
    ended = asyncio.Event()
    task = asyncio.create_task(_watch(progress, ended))
    try:
        yield
    finally:
        ended.set()
        await asyncio.wait([task], timeout=5)


async def _watch(progress: Progress, ended: asyncio.Event) -> None:
    told = None
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), PERIOD_S)
        quiet = time.monotonic() - progress.changed
        if ended.is_set() or quiet < QUIET_S:
            continue
        try:
            found = await asyncio.to_thread(waiting)
        except Exception as error:  # a look at a cluster in trouble must not end the run
            log.warning("Ray could not be asked what it waits for: %r", error)
            return
        # What is free meanwhile may change with every look.
        if found is not None and (wanted := found.partition(_FREE)[0]) != told:
            told = wanted
            progress.warn(f"nothing has gone on for {quiet:.0f} s, and Ray waits for room for {found}")
