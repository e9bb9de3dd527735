"""Dispatch: hands rollout requests to the RolloutPool actors and gives back their records.

The pools are restarted by Ray for ever and their `run` is idempotent, so a request ends with a record or with the job. The driver only
bounds how many are in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any

from forge_ray.rollout import RolloutRecord, RolloutRequest

if TYPE_CHECKING:
    from forge_ray.config import Config
    from forge_ray.run_dir import RunDir
    from forge_ray.serve_proxy.client import ProxyClient


class Dispatch:
    """The pools of one run."""

    def __init__(self, pools: list[Any], ended: Callable[[RolloutRecord], None] | None = None) -> None:
        """`ended` is told of each record that comes."""
        self._pools, self._ended = pools, ended
        self._load = [0] * len(pools)

    @classmethod
    def start(cls, config: Config, run: RunDir, client: ProxyClient, ended: Callable[[RolloutRecord], None] | None = None) -> Dispatch:
        """Make the pool actors of `config.rollouts.pools`."""
        from forge_ray.actors.rollout_pool import start_pools

        return cls(start_pools(config, run, client), ended)

    async def run(self, request: RolloutRequest) -> RolloutRecord:
        """One rollout, on the pool with the least to do."""
        index = self._load.index(min(self._load))
        self._load[index] += 1
        try:
            record = RolloutRecord.model_validate_json(await self._pools[index].run.remote(request.model_dump_json()))
        finally:
            self._load[index] -= 1
        if self._ended is not None:
            self._ended(record)
        return record

    async def run_all(self, requests: Iterable[RolloutRequest], limit: int) -> AsyncIterator[RolloutRecord]:
        """Run `requests`, at most `limit` at a time; records in the order in which they end."""
        waiting = list(requests)[::-1]
        running: set[asyncio.Task[RolloutRecord]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    running.add(asyncio.create_task(self.run(waiting.pop())))
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()

    async def shutdown(self, timeout: float) -> None:
        """End every sandbox; pools that do not answer in `timeout` seconds are killed by Ray with the job."""
        import ray

        async def stop(pool: Any) -> None:
            await pool.shutdown.remote()

        results = await asyncio.gather(*(asyncio.wait_for(stop(pool), timeout) for pool in self._pools), return_exceptions=True)
        for pool, result in zip(self._pools, results, strict=True):
            if isinstance(result, BaseException):
                ray.kill(pool)
