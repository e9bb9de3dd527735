"""The proxy's control plane, as the driver and the rollout pools see it.

A `ProxyClient` is two strings and a number, so it can be sent anywhere. Every operation is a broadcast to all replicas and idempotent. A
replica that is just being replaced makes a broadcast reach too few; operations then wait for its successor, which has its state from the
call log and its weights from the run directory.

Whom a broadcast reaches is what the controller told Serve's handle last. A handle is told nothing any more once an update came while its
event loop stood still or while the controller was away, and would ask a replica that is long gone for ever. So the handle runs in a
loop that never stops, in a thread of Serve's, and one that reaches too few replicas for `RENEW_S` makes way for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from forge_ray.errors import ForgeRayError
from forge_ray.serve_proxy.kinds import rank
from forge_ray.serve_proxy.parcel import Parcel

if TYPE_CHECKING:
    from forge_ray.config import Config

__all__ = ["DEPLOYMENT", "Parcel", "ProxyClient", "ProxyUnavailable", "SessionSummary", "merge", "nccl_sender"]

DEPLOYMENT = "policy"
RENEW_S = 10.0
"""Seconds for which a handle may reach too few replicas. Longer than Serve takes to notice that a replica was killed and to say so: two
of its health checks (`deployment.start`)."""
ATTEMPT_S = 60.0
"""Seconds after which all are asked again: a replica whose machine went away never refuses, it is silent."""


class ProxyUnavailable(ForgeRayError):
    """Not all replicas of the proxy answered in time. `late`: those of them that did answer before, by id."""

    def __init__(self, message: str, late: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.late = late


class SessionSummary(BaseModel):
    """What the proxy recorded of a session, over all replicas."""

    model_config = ConfigDict(extra="forbid")

    session: str
    calls: int = 0
    """Calls that ended by themselves (finished or length)."""
    sampled_tokens: int = 0
    """Tokens sampled, those of cancelled calls included."""
    last_status: str | None = None
    """finished | length | cancelled | failed of the outermost agent's last call."""
    last_reply: str | None = None
    """answer | tool_calls | length: what the harness was given last; None where it cannot be told."""
    limit: str | None = None
    """calls | tokens | context: the limit that the session ran into."""
    overflow: bool = False
    """A prompt did not fit the window, and no call ended after it."""
    failed: int = 0
    """Calls under which the engine failed or the replica was lost."""
    undelivered: int = 0
    """Calls whose reply did not reach the harness whole."""
    refused: int = 0
    """Requests answered with an error before the engine was asked."""
    upstream: int = 0
    """Calls that another model answered (`proxy.upstreams`); in no other number here."""


def merge(session: str, reports: list[dict[str, Any]]) -> SessionSummary:
    """One summary from the replicas' reports (`{"replica", "limit", "counts"}`).

    Each replica knows its own counters best; others know them from the call log, as they were when those started. A call that is still
    running in the counters of a replica that did not report was lost with it.
    """
    alive = {report["replica"] for report in reports}
    counts: dict[str, dict[str, Any]] = {}
    for report in reports:
        for source, found in report["counts"].items():
            if source == report["replica"] or (source not in alive and found["started"] >= counts.get(source, {"started": -1})["started"]):
                counts[source] = found
    lost = sum(found["live"] for source, found in counts.items() if source not in alive)
    summary = SessionSummary(
        session=session,
        calls=sum(found["calls"] for found in counts.values()),
        sampled_tokens=sum(found["sampled_tokens"] for found in counts.values()),
        limit=next((report["limit"] for report in reports if report["limit"]), None),
        overflow=any(found["overflow"] for found in counts.values()),
        failed=sum(found["failed"] for found in counts.values()) + lost,
        undelivered=sum(found["undelivered"] for found in counts.values()),
        refused=sum(found["refused"] for found in counts.values()),
        upstream=sum(found["upstream"] for found in counts.values()),
    )
    ended = [found for found in counts.values() if found["last_status"] is not None]
    if ended:
        last = max(ended, key=lambda found: (rank(found["last_kind"]), found["last_ended"]))
        summary.last_status, summary.last_reply = last["last_status"], last["last_reply"]
    return summary


@dataclass
class ProxyClient:
    """Talks to every replica of the Serve app `app`. Picklable; use it from one event loop at a time."""

    app: str
    base_url: str
    """`http://host:port`, where harnesses reach the proxy."""
    replicas: int
    _handle: Any = field(default=None, init=False, repr=False, compare=False)
    _made: float = field(default=0.0, init=False, repr=False, compare=False)
    """When the handle was made, on the monotonic clock."""
    _known: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Replicas that answered when all did last."""
    _making: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"app": self.app, "base_url": self.base_url, "replicas": self.replicas}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def url(self, token: str) -> str:
        """The base URL of a session, for a harness's configuration."""
        return f"{self.base_url}/s/{token}"

    async def close_session(self, session: str, timeout_s: float = 180.0) -> SessionSummary:
        """End a session for good: its running calls are aborted, later ones refused. Idempotent. Raises `ProxyUnavailable`."""
        return merge(session, await self.all("close_session", session, timeout_s=timeout_s))

    async def update_weights(
        self,
        weights: Any,
        version: str,
        timeout_s: float = 300.0,
        *,
        pause: Literal["keep", "wait", "abort"] = "keep",
        decide: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Bring every replica to `version`, or leave all at theirs; see `switch`. Idempotent.

        `weights`: the bytes of a safetensors file (or a Ray reference to them), a `Parcel`, a path that the replicas can read, or None for
        the file that the run's `weights/current.json` names, which must name this version already. `decide` makes it name that. `pause`:
        what becomes of running calls (`train.sync.pause`). Raises `ProxyUnavailable`, and what a replica found wrong with the weights.
        """
        from forge_ray.serve_proxy.switch import switch

        return await switch(self, weights, version, timeout_s=timeout_s, pause=pause, decide=decide)

    async def status(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Per replica: `replica`, `pid`, `node` (Ray's id), `version`, `live` (running calls), `calls`, `sampled_tokens`, `window` and
        `sessions`."""
        return await self.all("status", timeout_s=timeout_s)

    async def replace(self, replica: str) -> None:
        """Kill a replica, so that Serve starts another in its place. One that is gone already is no error."""
        import ray

        with contextlib.suppress(ValueError):  # no such actor
            actor = await asyncio.to_thread(ray.get_actor, f"SERVE_REPLICA::{self.app}#{DEPLOYMENT}#{replica}", "serve")
            ray.kill(actor)

    async def all(self, method: str, *arguments: Any, timeout_s: float) -> list[dict[str, Any]]:
        """The answers of all replicas, each from a different one. Waits for replicas that are missing.

        Raises `ProxyUnavailable`, whose `late` are those that could have answered.
        """
        deadline = time.monotonic() + timeout_s
        failing_since, problem, late = time.monotonic(), "no replica answered", self._known
        while (left := deadline - time.monotonic()) > 0:
            results = await self._broadcast(min(left, ATTEMPT_S), method, *arguments)
            answers = [result for result in results if not isinstance(result, BaseException)]
            ids = {answer["replica"] for answer in answers}
            if len(ids) >= self.replicas:
                self._known = ids
                return answers
            late = self._known - ids
            problem = f"{len(ids)} of {self.replicas} replicas answered"
            for error in results:
                if isinstance(error, BaseException):
                    if not _transient(error):
                        raise error
                    problem += f" ({' '.join(str(error).split())[:300] or repr(error)})"
            if time.monotonic() - max(failing_since, self._made) > RENEW_S:
                await self._drop_handle()
            await asyncio.sleep(min(0.3, max(0.0, deadline - time.monotonic())))
        raise ProxyUnavailable(f"{method}: {problem} within {timeout_s:.0f} s", frozenset(late))

    async def _broadcast(self, timeout_s: float, method: str, *arguments: Any) -> list[Any]:
        """The answer or the error of each replica that the handle knows; one error where it reaches none."""
        try:
            handle = self._handle or await asyncio.to_thread(self._make_handle)
            return await _each(handle.broadcast(method, *arguments), timeout_s)
        except Exception as error:
            return [error]

    def _make_handle(self) -> Any:
        """A handle that shares nothing with earlier ones of this process. Raises `KeyError` when there is no such app."""
        from ray import serve
        from ray.serve.handle import DeploymentHandle

        with self._making:
            if self._handle is None:
                serve.get_deployment_handle(DEPLOYMENT, self.app)
                handle: Any = DeploymentHandle(DEPLOYMENT, self.app)
                handle._init(_run_router_in_separate_loop=True)  # whatever Serve's environment says
                self._handle, self._made = handle, time.monotonic()
            return self._handle

    async def _drop_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(handle.shutdown_async(), 5)


def nccl_sender(config: Config, rank: int, named: Callable[[], Iterator[tuple[str, Any]]]) -> Any:
    """For a train worker: sends weights from GPU to GPU, see `vllm_internals/nccl_trainer.py`. Untested (needs GPUs)."""
    from forge_ray.serve_proxy.vllm_internals.nccl_trainer import NcclSender

    return NcclSender(config, rank, named)


async def _each(response: Any, timeout_s: float) -> list[Any]:
    """Of Serve's response to a broadcast: what each replica answered or raised, or that it said nothing.

    By a private method: what Serve has in public (`results_async`, Ray 2.60) gives every answer or, when its time is up, none, so that one
    silent replica would hide what the others said.
    """
    results = await asyncio.wait_for(response._fetch_replica_results_async(), timeout_s)
    return await asyncio.gather(*(_in_time(result, timeout_s) for result in results))


async def _in_time(result: Any, timeout_s: float) -> Any:
    """A replica's answer, or what it raised, or that it said nothing."""
    try:
        return await asyncio.wait_for(result.get_async(), timeout_s)
    except TimeoutError:
        return TimeoutError("one did not answer")
    except Exception as error:
        return error


def _transient(error: BaseException) -> bool:
    """Whether a replica was lost or is not there yet, so that asking again can help."""
    import grpc
    from ray.exceptions import RayActorError, RayTaskError
    from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

    if isinstance(error, RayTaskError):
        return False
    if isinstance(error, grpc.RpcError):  # the replica's server was shutting down
        code = getattr(error, "code", lambda: None)()
        return code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    return isinstance(error, RayActorError | DeploymentUnavailableError | RayServeException | ConnectionError | TimeoutError)
