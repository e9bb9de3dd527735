"""Updates: a replica's weight updates, in two phases.

`prepare` brings the weights onto the machine and checks them, while calls run; nothing changes yet. `commit` switches: running calls are
frozen, drained or ended (`train.sync.pause`), the engine loads, calls go on. Between the two the driver makes the version the run's current
one, once every replica is prepared; so a replica that starts at any moment loads what the others serve or are about to. Both are idempotent
by version, and one runs at a time. A failed `prepare` leaves the old weights; a failed `commit` leaves an engine that must be replaced.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import ray

from forge_ray.run_dir import RunDir
from forge_ray.serve_proxy import weights
from forge_ray.serve_proxy.parcel import Parcel

if TYPE_CHECKING:
    from forge_ray.serve_proxy.admission import Admission
    from forge_ray.serve_proxy.recording import Recorder
    from forge_ray.serve_proxy.vllm_internals import Engine, PauseMode


class Updates:
    """Of one replica that serves `model_dir`. `tied`: its head is its embedding."""

    def __init__(self, run: RunDir, model_dir: str, *, engine: Engine, recorder: Recorder, admission: Admission, tied: bool) -> None:
        self._run, self._model_dir, self._tied = run, model_dir, tied
        self._engine, self._recorder, self._admission = engine, recorder, admission
        self._expected = weights.checkpoint(model_dir)
        self._node = ray.get_runtime_context().get_node_id()
        self._lock = asyncio.Lock()
        self._sending = False
        """A transfer has begun and holds the requests back."""
        self._step_done = ""
        """Serial of the last step of a transfer that was done."""
        self._staged: tuple[str, weights.WeightFiles, ExitStack] | None = None

    async def prepare(self, version: str, payload: Any) -> None:
        """Get `version` ready. `payload`: see `ProxyClient.update_weights`. Raises `WeightMismatch`."""
        async with self._lock:
            if version in (self._recorder.version, self._staged and self._staged[0]):
                return
            if payload is None:
                current = weights.current(self._run)
                if current is None or current[0] != version:
                    raise weights.WeightMismatch(f"weights/current.json does not name version {version}")
                payload = current[1]
            elif isinstance(payload, Parcel):
                payload = await payload.open(self._node)
            elif isinstance(payload, ray.ObjectRef):
                payload = await payload
            await asyncio.to_thread(self._stage, version, payload)

    async def commit(self, version: str, pause: PauseMode) -> float | None:
        """Serve `version`, which was prepared here, or which the run calls current. Returns the seconds from pause to resume; None if it is
        served already."""
        async with self._lock:
            if self._recorder.version == version:
                return None
            if self._staged is None or self._staged[0] != version:
                current = weights.current(self._run)
                if current is None or current[0] != version:
                    raise weights.WeightMismatch(f"version {version} was not prepared here")
                await asyncio.to_thread(self._stage, version, current[1])
            return await self._switch(pause)

    async def discard(self) -> None:
        """Forget what was prepared."""
        async with self._lock:
            self._drop()

    async def load_current(self) -> None:
        """Serve what the run calls current, again if that changes meanwhile."""
        while (current := weights.current(self._run)) is not None and current[0] != self._recorder.version:
            async with self._lock:
                await asyncio.to_thread(self._stage, *current)
                await self._switch("keep")

    async def transfer(self, serial: str, step: str, info: dict[str, Any], version: str | None, pause: PauseMode) -> None:
        """One step (init | start | update | finish) of vLLM's weight-transfer protocol, for a trainer that sends by nccl. Idempotent by
        `serial`: one that is asked for twice is done once. Untested: no GPU has run it."""
        async with self._lock:
            if serial == self._step_done:
                return
            if step == "start" and not self._sending:
                self._admission.pause()
                self._sending = True
            await self._engine.transfer(step, info, version, pause=pause)
            self._step_done = serial
            if step == "finish":
                self._sent()

    def _sent(self) -> None:
        """The weights of a transfer are there, or came by another way after it had failed."""
        if self._sending:
            self._sending = False
            self._admission.resume()

    def _stage(self, version: str, payload: Any) -> None:
        """Blocking."""
        self._drop()
        with ExitStack() as stack:
            path = stack.enter_context(weights.as_file(payload))
            found = weights.files(path, self._run, self._model_dir)
            weights.check(found, self._expected, tied=self._tied)
            self._staged = version, found, stack.pop_all()

    def _drop(self) -> None:
        if self._staged is not None:
            self._staged[2].close()
            self._staged = None

    async def _switch(self, pause: PauseMode) -> float:
        assert self._staged is not None
        version, found, _ = self._staged
        began = time.monotonic()
        with self._admission.paused():
            await self._engine.update_policy(found, version, pause=pause)
        paused = time.monotonic() - began
        self._sent()
        await asyncio.to_thread(self._drop)
        return paused
