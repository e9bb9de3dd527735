"""The Ray Serve deployment "policy": a replica is vLLM's API server app over a recording engine, behind the edge, in one process.

`start` deploys it and returns when every replica is healthy and requests reach it; `stop` removes it. A replica is healthy once it serves
the weights that the run directory calls current, under their version label; what the call log knows of a session it learns when it meets
that session (`recovery`), so a replica that replaces a killed one continues where that stopped. It is unhealthy, and gets replaced, when
its engine is dead, when a weight update failed half-way or when its log cannot be written. Control methods are broadcast by
`client.ProxyClient` and answer with the replica's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
import zlib
from typing import Any, Literal

import ray
from ray import serve

from forge_ray import ray_env
from forge_ray.config import Config, Limits
from forge_ray.errors import ForgeRayError, UserError
from forge_ray.run_dir import RunDir, secret
from forge_ray.serve_proxy import front_door
from forge_ray.serve_proxy.client import DEPLOYMENT, ProxyClient
from forge_ray.serve_proxy.sessions import Sessions
from forge_ray.serve_proxy.upstream_routes import Keys

MARK = "FORGE-RAY-USER-ERROR:"
"""Precedes a `UserError`'s line in a replica's failure, which reaches the driver as text."""


class ReplicaFailed(ForgeRayError):
    """A replica did not come up, for a reason that is not the user's input."""


class Policy:
    """One replica. Everything happens in its event loop."""

    def __init__(self, config: Config, run_root: str, model_dir: str, incarnation: int, keys: Keys | None = None) -> None:
        from pathlib import Path

        self._keys = keys
        self.config, self.run, self.model_dir, self.incarnation = config, RunDir(Path(run_root)), model_dir, incarnation
        self.replica = serve.get_replica_context().replica_id.unique_id
        self._ready = False

    async def __serve_build_asgi_app__(self) -> Any:
        try:
            return await self._build()
        except UserError as error:
            raise RuntimeError(f"{MARK}{error}") from error

    async def _build(self) -> Any:
        from forge_ray.serve_proxy import vllm_internals
        from forge_ray.serve_proxy.admission import Admission
        from forge_ray.serve_proxy.disconnects import Disconnects
        from forge_ray.serve_proxy.edge import Edge, EdgeSettings
        from forge_ray.serve_proxy.recording import Recorder
        from forge_ray.serve_proxy.recovery import Recovery
        from forge_ray.serve_proxy.session_index import SessionIndex
        from forge_ray.serve_proxy.updates import Updates
        from forge_ray.serve_proxy.upstream_routes import Targets
        from forge_ray.trajectories.call_log import CallLogWriter

        config = self.config
        self.index = SessionIndex(self.replica, config.proxy.limits)
        self.recovery = Recovery(self.index, self.run.calls, alone=config.proxy.replicas == 1)
        # vLLM's own default would let every replica, and every successor of one, draw the same samples.
        seed = zlib.crc32(f"{config.seed}/{self.incarnation}/{self.replica}".encode()) & 0x7FFFFFFF
        args = vllm_internals.parse_arguments(config, self.model_dir, seed)
        self.engine = vllm_internals.make_engine(config, args)
        self.log = CallLogWriter(self.run.calls / f"{self.replica}.jsonl", segment_bytes=config.proxy.log_segment_mb * 2**20)
        window = int(self.engine.model_config.max_model_len)
        self.recorder = self.engine.recorder = Recorder(
            log=self.log,
            index=self.index,
            proxy=config.proxy,
            window=window,
            version="",
            refusals=vllm_internals.REFUSALS,
        )
        slots = int(self.engine.vllm_config.scheduler_config.max_num_seqs)
        self.admission = self.recorder.admission = Admission.of(config.proxy, slots)
        self.updates = Updates(
            self.run,
            self.model_dir,
            engine=self.engine,
            recorder=self.recorder,
            admission=self.admission,
            tied=bool(getattr(self.engine.model_config.hf_config, "tie_word_embeddings", False)),
        )
        await self.engine.label(f"{self.incarnation}.init")
        await self.updates.load_current()
        app = await vllm_internals.make_app(self.engine, args)
        settings = EdgeSettings.of(config, self.index.window(window), self.run.bodies)
        sessions = Sessions(secret(self.run))
        self.edge = Edge(
            app,
            settings=settings,
            sessions=sessions,
            index=self.index,
            log=self.log,
            admission=self.admission,
            recovery=self.recovery,
            targets=Targets(config, self._keys),
        )
        self._ready = True
        self._catching_up = asyncio.create_task(self.recovery.start())
        return Disconnects(self.edge)

    # ---- control, broadcast to every replica ----

    async def close_session(self, session: str) -> dict[str, Any]:
        """Refuse the session from now on, abort its calls, and report it once their events are on disk."""
        from forge_ray.serve_proxy.session_index import session_event

        await self.recovery.close(session)
        if self.index.close(session):
            await self.log.append(session_event(session, "closed", None, time.time()))
        self.edge.abort(session)
        await self.engine.abort_session(session)
        await self.edge.drained(session, timeout_s=30.0)
        self.edge.forget(session)
        if self.engine.prompts is not None:
            self.engine.prompts.forget(session)
        return {"replica": self.replica, **self.index.state(session).report()}

    async def prepare_weights(self, version: str, payload: list[Any]) -> dict[str, Any]:
        """Get `version` ready, see `Updates`. `payload` holds one item, see `ProxyClient.update_weights`."""
        # A task of its own, here and below: a caller that gives up must not leave a half-updated engine behind.
        await asyncio.shield(asyncio.ensure_future(self.updates.prepare(version, payload[0])))
        return {"replica": self.replica, "version": self.recorder.version}

    async def commit_weights(self, version: str, pause: Literal["keep", "wait", "abort"]) -> dict[str, Any]:
        """Serve `version`; `pause`: `train.sync.pause`."""
        paused = await asyncio.shield(asyncio.ensure_future(self.updates.commit(version, pause)))
        return {"replica": self.replica, "version": self.recorder.version, "paused_s": paused}

    async def discard_weights(self) -> dict[str, Any]:
        """Forget what was prepared."""
        await self.updates.discard()
        return {"replica": self.replica, "version": self.recorder.version}

    async def weight_transfer(self, serial: str, step: str, info: dict[str, Any], version: str | None) -> dict[str, Any]:
        """See `Updates.transfer`. `info`: the step's own; of `init` with `offsets`, this replica's first rank by its id."""
        info = dict(info)
        if offsets := info.pop("offsets", None):
            info["rank_offset"] = offsets[self.replica]
        await asyncio.shield(asyncio.ensure_future(self.updates.transfer(serial, step, info, version, self.config.train.sync.pause)))
        return {"replica": self.replica, "version": self.recorder.version}

    async def status(self) -> dict[str, Any]:
        """What the replica is doing. `running` and `waiting` are requests, `live` the engine's calls."""
        return {
            "replica": self.replica,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "version": self.recorder.version,
            "live": len(self.recorder.live),
            "calls": self.recorder.calls,
            "sampled_tokens": self.recorder.sampled_tokens,
            "window": self.index.window(self.recorder.engine_window),
            "sessions": len(self.index.sessions()),
            "open_sessions": sum(not self.index.closed(session) for session in self.index.sessions()),
            **self.recovery.report(),
            **self.admission.status(),
        }

    async def check_health(self) -> None:
        """Called by Serve; raising gets the replica replaced."""
        if not self._ready:
            return
        await self.engine.check_health()
        if self.log.broken is not None:
            raise self.log.broken

    def __del__(self) -> None:
        # Serve's orderly end. After a kill the engine's process ends by its lifeline.
        if engine := getattr(self, "engine", None):
            engine.shutdown(timeout=1.0)
        if log := getattr(self, "log", None):
            log.close()


def start(config: Config, run: RunDir, model_dir: str, incarnation: int) -> ProxyClient:
    """Deploy the proxy of a run and wait until all its replicas are healthy and Serve's door leads to each. Ray must be connected.

    Raises `UserError` for a port in use, a missing model or an argument that vLLM refuses, `ReplicaFailed` for anything else.
    """
    proxy = config.proxy
    if not os.path.isfile(os.path.join(model_dir, "config.json")):
        raise UserError(
            f"{model_dir} is no model directory (no config.json in it)", where="policy.model", fix="give a Hugging Face model directory"
        )
    keys = Keys.of(config)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process's terminal belongs to the run
    if proxy.replicas > 1 and not ray_env.haproxy() and proxy.limits != Limits():
        # Limits are counted where a session's calls are, and only HAProxy mode keeps a session on one replica.
        raise UserError(
            "proxy.limits with several replicas need Serve's HAProxy mode",
            where="proxy.replicas",
            fix="start Ray with the variables of cluster/ray.env",
        )
    _start_serve(proxy.host, proxy.port)
    options: dict[str, Any] = {
        "num_cpus": proxy.replica_cpus,
        "num_gpus": proxy.replica_gpus,
        "runtime_env": {"env_vars": {**ray_env.worker(), **config.policy.environment}},
    }
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=proxy.replicas,
        # Above any admission limit of ours: control calls queue behind running ones on a replica that is full.
        max_ongoing_requests=1_000_000,
        ray_actor_options=options,
        health_check_period_s=2,
        health_check_timeout_s=120,
        graceful_shutdown_wait_loop_s=0.2,
        # A replica that is told to stop gets no new requests (Serve stops routing to it) and ends when its running ones are over.
        graceful_shutdown_timeout_s=max(proxy.drain_s, 1),
        max_constructor_retry_count=2,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )(serve.ingress()(Policy))
    app = f"forge-{config.name}"
    try:
        serve.run(deployment.bind(config, str(run.root), model_dir, incarnation, keys), name=app, route_prefix="/")
    except RuntimeError as error:
        reason = _failure(app) or str(error)
        serve.delete(app)
        found = re.search(re.escape(MARK) + r"(.*)", reason)
        if found:
            raise UserError(found.group(1).strip()) from None
        raise ReplicaFailed(f"the policy's replica did not start: {reason.strip()[-1500:]}") from error
    host = "127.0.0.1" if proxy.host in ("0.0.0.0", "::", "") else proxy.host
    client = ProxyClient(app=app, base_url=f"http://{host}:{proxy.port}", replicas=proxy.replicas)
    front_door.wait(client, Sessions(secret(run)))
    return client


def stop(app_name: str) -> None:
    """Remove the app and its replicas. An app that is not there is no error."""
    from ray.serve.exceptions import RayServeException

    with contextlib.suppress(RayServeException):  # Serve does not run
        serve.delete(app_name)


def _start_serve(host: str, port: int) -> None:
    """Start Serve's HTTP side on `port`, or make sure that the Serve that runs already uses it."""
    from ray.serve.context import _set_global_client

    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        options: Any = ray.get(controller.get_http_config.remote(), timeout=30)
        used = options.port
    except ValueError:
        _set_global_client(None)  # what this process may remember of another cluster's Serve
    else:
        if used != port:
            raise UserError(
                f"Serve runs on port {used} in this cluster already", where="proxy.port", fix=f"set proxy.port={used}, or stop Serve"
            )
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0" if ray_env.haproxy() else host, port))
    except OSError as error:
        raise UserError(
            f"port {port} cannot be used ({error.strerror})", where="proxy.port", fix="choose another with proxy.port=…"
        ) from None
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING", "enable_access_log": False})


def _failure(app: str) -> str | None:
    """What Serve knows of why the app did not come up."""
    status = serve.status().applications.get(app)
    if status is None:
        return None
    return "\n".join([status.message, *(deployment.message for deployment in status.deployments.values())])
