"""RolloutPool: the Ray actor that runs rollouts on one node.

A pool takes a request and gives back a record. Ray restarts it for ever and sends it every unanswered request again
(`max_restarts=-1`, `max_task_retries=-1`), so that a request ends with a record or with the job.

Invariants:
- `run` is idempotent: a finished attempt is on disk and is returned as it stands; a request that is running is joined, not started again.
- An attempt whose pool died has a directory and no result. It is never resumed: its sandbox is destroyed when the pool starts again, its
  session is closed, and the next number is tried. So one rollout may leave several sessions in the call log, one of them with a record.
- The event loop is never blocked; how many rollouts run at once is the caller's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.actors.attempt import Bench, attempt, result_file, rollout_id
from forge_ray.config import Config
from forge_ray.errors import ForgeRayError
from forge_ray.rollout import RolloutRecord, RolloutRequest
from forge_ray.run_dir import RunDir, secret

if TYPE_CHECKING:
    from forge_ray.serve_proxy.client import ProxyClient

CONCURRENCY = 10_000
"""Calls that the actor takes at once; far above any admission limit, so that `status`, `cancel` and `shutdown` never queue."""

log = logging.getLogger(__name__)


class RolloutCancelled(ForgeRayError):
    """The rollout was cancelled, or the pool shut down; no record was made."""


class RolloutPool:
    """Runs rollouts; all methods are coroutines but the constructor, which clears what an earlier life left behind."""

    def __init__(self, config: str, run: str, proxy: ProxyClient) -> None:
        """`config` is the run's config as JSON, `run` the absolute path of its directory."""
        self.bench = make_bench(Config.model_validate_json(config), RunDir(Path(run)), proxy)
        self._running: dict[str, asyncio.Task[RolloutRecord]] = {}
        self._started: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._finished = 0
        self._closed = False
        # Ray calls the constructor of an async actor inside or outside of a loop as it likes: a thread of our own has none.
        with ThreadPoolExecutor(1) as thread:
            self._cleared = thread.submit(lambda: asyncio.run(self._clear())).result()

    async def run(self, request: str) -> str:
        """Run the `RolloutRequest` given as JSON; returns the `RolloutRecord` as JSON. Raises `RolloutCancelled`."""
        wanted = RolloutRequest.model_validate_json(request)
        key = wanted.key
        if self._closed:
            raise RolloutCancelled(f"{key}: the pool is shut down")
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._run(wanted), name=key)
            self._started[key] = time.monotonic()
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            await asyncio.wait({task})
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:  # nobody asks for it any more: done, or its caller went away
                task.cancel()
                for table in (self._waiting, self._running, self._started):
                    table.pop(key, None)
        if task.cancelled():
            raise RolloutCancelled(f"{key}: cancelled")
        return task.result().model_dump_json()

    async def cancel(self, keys: list[str] | None = None) -> int:
        """End the rollouts with these keys (None: all) and their sandboxes; returns how many ran."""
        tasks = [task for key, task in self._running.items() if keys is None or key in keys]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return len(tasks)

    async def shutdown(self) -> int:
        """Take no further rollout and end those that run, with their sandboxes; returns how many ran."""
        self._closed = True
        return await self.cancel()

    async def status(self) -> dict[str, Any]:
        """`pid`, `node`, `finished` rollouts of this life, `cleared` leftovers, and `running`: key -> seconds."""
        now = time.monotonic()
        return {
            "pid": os.getpid(),
            "node": os.uname().nodename,
            "finished": self._finished,
            "cleared": self._cleared,
            "running": {key: round(now - since, 1) for key, since in self._started.items()},
        }

    async def _run(self, request: RolloutRequest) -> RolloutRecord:
        record, number, interrupted = await asyncio.to_thread(claim, self.bench.run, request)
        if record is not None:
            return record
        await asyncio.gather(*(self._close(rollout_id(request.key, lost)) for lost in interrupted))
        record = await attempt(request, number, self.bench)
        self._finished += 1
        return record

    async def _close(self, session: str) -> None:
        """Close the session of an interrupted attempt: nothing of it may be sampled or recorded any more."""
        try:
            await self.bench.proxy.close_session(session, timeout_s=30)
        except Exception as error:  # its harness is dead and no record names the session, so nothing is lost
            log.warning("session %s of an interrupted attempt could not be closed: %s", session, error)

    async def _clear(self) -> int:
        """Destroy the sandboxes of this run on this node whose owner is gone."""
        cleared = 0
        for leftover in await self.bench.backend.leftovers():
            try:
                await self.bench.backend.destroy_leftover(leftover)
                cleared += 1
            except ForgeRayError as error:
                log.warning("sandbox %s of an earlier life stays: %s", leftover.directory, error)
        return cleared


def claim(run: RunDir, request: RolloutRequest) -> tuple[RolloutRecord | None, int, list[int]]:
    """The stored record of `request`, or None and the attempt number to run (its directory is made), and the interrupted
    attempts' numbers."""
    number, interrupted = request.attempt, []
    while True:
        id = rollout_id(request.key, number)
        try:
            return RolloutRecord.model_validate_json(result_file(run, id).read_text()), number, interrupted
        except FileNotFoundError:
            pass
        try:
            (run.rollouts / id).mkdir(parents=True)
            return None, number, interrupted
        except FileExistsError:
            interrupted.append(number)
            number += 1


def make_bench(config: Config, run: RunDir, proxy: ProxyClient) -> Bench:
    """What attempts need, from the config and the run's state."""
    from forge_ray.sandboxes.process import ProcessBackend
    from forge_ray.serve_proxy.sessions import Sessions

    backend = ProcessBackend(config.sandbox, config.name)  # the only value that `sandbox.backend` has yet
    return Bench(config, run, backend, proxy, Sessions(secret(run)))


def start_pools(config: Config, run: RunDir, proxy: ProxyClient) -> list[Any]:
    """Start `config.rollouts.pools` pool actors, spread over the nodes; returns their handles. They die with the job that started them."""
    import ray

    actor = ray.remote(RolloutPool).options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=CONCURRENCY, scheduling_strategy="SPREAD"
    )
    return [actor.remote(config.model_dump_json(), str(run.root), proxy) for _ in range(config.rollouts.pools)]
