"""What every command that runs rollouts needs up: Ray, the policy behind the proxy, the pools. And how it all goes down again.

`Runtime` is an async context manager. Leaving it, for whatever reason, ends the sandboxes, removes the Serve app (which would
outlive the job) and ends a cluster that this process started, in that order and within `STOP_S` seconds each, so that Ctrl-C
leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from forge_ray.config import Config
from forge_ray.errors import ForgeRayError, UserError
from forge_ray.job import interrupts, resources, threads
from forge_ray.job.cluster import Cluster, connect
from forge_ray.job.dispatch import Dispatch
from forge_ray.job.scheduler import TaskRef
from forge_ray.job.sources import resolve
from forge_ray.job.store import StoreThread, location
from forge_ray.model_files import MODEL_FIX, TEACHER_FIX, model_problem, policy_problem, vocabulary_problem
from forge_ray.rewards.plan import refuse
from forge_ray.run_dir import RunDir
from forge_ray.tasks.task import load_tasks

if TYPE_CHECKING:
    from forge_ray.serve_proxy.client import ProxyClient

log = logging.getLogger(__name__)

STOP_S = 4.0
"""Patience with each part that is being stopped."""
STORE_S = 60.0
"""Patience with the store's last files at the end of a run that ended well; what is missing then is stored by the next start."""


class RunFailed(ForgeRayError):
    """The run cannot go on; the message says why and what to look at."""


class Runtime:
    """One process's hold on Ray, the proxy and the pools of a run."""

    def __init__(self, config: Config, run: RunDir) -> None:
        self.config, self.run = config, run
        self._cluster: Cluster | None = None
        self._client: ProxyClient | None = None
        self._dispatch: Dispatch | None = None
        self._store: StoreThread | None = None
        self._model: Path | None = None
        """The directory that is served."""
        self._starting: asyncio.Future[ProxyClient] | None = None
        """The thread that deploys the proxy; a cancelled wait does not end it."""

    async def __aenter__(self) -> Runtime:
        """From here on the first SIGINT or SIGTERM cancels the current task, and no other does anything."""
        interrupts.cancel_once()
        return self

    def connect(self) -> Cluster:
        """Join or start Ray (blocking)."""
        location(self.config, self.run)  # a store that cannot be is said before anything starts
        with interrupts.while_blocking():
            self._cluster = connect(self.config, extra_environment=self.config.policy.environment)
        interrupts.cancel_once()  # once more: ray.init installs handlers of its own
        return self._cluster

    def require_resources(self, *, training: bool) -> None:
        """Raise `UserError` for what this run's own cluster can never give."""
        import ray

        assert self._cluster is not None
        if self._cluster.owned and (problem := resources.shortage(self.config, ray.cluster_resources(), training=training)) is not None:
            raise problem

    async def model(self) -> Path:
        """The initial model's directory. Raises `UserError` where it cannot be served, before an engine says so in a hundred lines."""
        model = await resolve(self.config.policy.model, "policy.model", "model", self.run, self.config.seed)
        if (problem := policy_problem(self.config.policy, model)) is not None:
            raise UserError(problem, where="policy.model", fix=MODEL_FIX)
        return model

    async def learner_model(self) -> Path:
        """`model`, where it can also be trained as `train` says. Raises `UserError`."""
        from forge_ray.train_loop import preflight

        model = await self.model()
        if preflight.needed(self.config.train):
            await asyncio.to_thread(preflight.refuse, model, self.config.train)
        return model

    async def teacher(self, model: Path) -> Path | None:
        """The directory of `train.loss.distillation.teacher`, if there is one. Raises `UserError` where it cannot rate `model`'s tokens."""
        if (settings := self.config.train.loss.distillation) is None or settings.teacher is None:
            return None
        where = "train.loss.distillation.teacher"
        teacher = await resolve(settings.teacher, where, "distillation-teacher", self.run, self.config.seed)
        if (problem := model_problem(teacher) or vocabulary_problem(model, teacher)) is not None:
            raise UserError(problem, where=where, fix=TEACHER_FIX)
        return teacher

    async def tasks(self) -> tuple[list[TaskRef], list[TaskRef]]:
        """Training and held-out tasks, validated."""
        sources = [("train", self.config.tasks.train), ("heldout", self.config.tasks.heldout)]
        found = [
            await resolve(source, f"tasks.{name}", f"tasks-{name}", self.run, self.config.seed) if source else None
            for name, source in sources
        ]
        loaded = [await asyncio.to_thread(load_tasks, path) if path else [] for path in found]
        refuse([task for tasks in loaded for task in tasks], self.config.rollouts)
        train, heldout = ([TaskRef(task.name, str(task.directory)) for task in tasks] for tasks in loaded)
        return train, heldout

    async def serve(self, model: Path, incarnation: int) -> ProxyClient:
        """Start the proxy on `model`; returns when its replicas are healthy."""
        from forge_ray.serve_proxy.deployment import start

        self._model = model
        self._starting = threads.call(start, self.config, self.run, str(model), incarnation)
        client = await asyncio.shield(self._starting)
        self._client = client
        return client

    def pools(self, client: ProxyClient) -> Dispatch:
        """Start the rollout pools, and the store's thread, which is told of each rollout that ends."""
        self._store = StoreThread(self.config, self.run, self._model)
        self._dispatch = Dispatch.start(self.config, self.run, client, self._store.ended)
        return self._dispatch

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._cluster is None:
            interrupts.done(leaving=kind is not None)
            return
        interrupts.ignore()  # a second Ctrl-C must not cut the cleanup short
        if self._dispatch is not None:
            await self._part("sandboxes", self._dispatch.shutdown(STOP_S))
        if self._store is not None:
            await asyncio.to_thread(self._store.close, STORE_S if kind is None else STOP_S)
        if self._starting is not None:
            await self._part("Serve app", self._stop_serving(self._starting))
        if not threads.busy():
            import ray

            await self._part("Ray", asyncio.to_thread(ray.shutdown))
        if kind is None or issubclass(kind, asyncio.CancelledError | UserError):
            self._cluster.ended_well()
        interrupts.done(leaving=kind is not None)

    async def _stop_serving(self, starting: asyncio.Future[ProxyClient]) -> None:
        from forge_ray.serve_proxy import deployment

        assert self._cluster is not None
        if self._cluster.owned and not starting.done():
            return  # it ends with its cluster, long before it would be up
        while True:
            # A deployment under way may come up after it was removed: only what is removed once its thread has ended stays away.
            done = starting.done()
            await threads.call(deployment.stop, f"forge-{self.config.name}")
            if done:
                return
            await asyncio.wait({starting}, timeout=0.5)

    async def _part(self, what: str, work: Awaitable[object]) -> None:
        log.info("stopping the %s", what)
        try:
            await asyncio.wait_for(work, STOP_S + 2)
        except Exception as error:
            # Going down must go on; what could not be stopped is said.
            with contextlib.suppress(ValueError):
                log.warning("stopping the %s failed: %r", what, error)
