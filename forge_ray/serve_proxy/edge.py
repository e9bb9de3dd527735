"""The edge: the ASGI application around vLLM's own, and the upper of the two taps.

It decides who is calling and whether the request may be served, puts the caller's `CallContext` where the engine tap finds it, and
has written down what became of the reply. What it may change in a request is small and listed in the dialects: the model's name, an
output cap above the window, fields that vLLM refuses although the dialect allows them. A body is serialised anew only then.

Only the dialects' routes and harmless probes are open; vLLM's app has others (tokenisation, load, adapters) that a harness must
not reach. Responses pass through as they come. Events of a session's requests are on disk when `drained` says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forge_ray.config import Config
from forge_ray.rollout import Purpose
from forge_ray.serve_proxy import dialects, history, identity, kinds, probes
from forge_ray.serve_proxy.admission import Admission, NotAdmitted
from forge_ray.serve_proxy.delivery import Delivery
from forge_ray.serve_proxy.dialects import Refusal
from forge_ray.serve_proxy.dialects.base import Inner, parse_object
from forge_ray.serve_proxy.exchange import Client, Gone, Tee, inner_scope
from forge_ray.serve_proxy.identity import CallContext
from forge_ray.serve_proxy.intake import ModelNames, read_body, split_prefix, verify
from forge_ray.serve_proxy.keepalive import Pulse
from forge_ray.serve_proxy.recovery import Recovery
from forge_ray.serve_proxy.refusals import Caller, Refusals
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.serve_proxy.sessions import Session, Sessions, UnknownSession
from forge_ray.serve_proxy.under_way import UnderWay
from forge_ray.serve_proxy.upstream import Upstreams
from forge_ray.serve_proxy.upstream_routes import Target, Targets
from forge_ray.trajectories.call_log import CallLogError, CallLogWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EdgeSettings:
    """What the edge must know of its replica."""

    served_name: str
    window: int
    """The engine's `max_model_len`, tokens."""
    max_body_bytes: int
    bodies: Path | None = None
    """Where request and response bodies are kept; None: only their digests are."""
    keepalive_s: float = 10.0
    """Longest silence of a stream, seconds; 0 = any."""
    obeyed: frozenset[Purpose] = frozenset()
    """Purposes whose requests choose their own sampling parameters."""

    @classmethod
    def of(cls, config: Config, window: int, bodies: Path) -> EdgeSettings:
        """As the config says; `bodies`: where they are kept, if they are."""
        return cls(
            served_name=config.policy.served_name,
            window=window,
            max_body_bytes=config.proxy.max_body_bytes,
            bodies=bodies if config.proxy.keep_bodies else None,
            keepalive_s=config.proxy.keepalive_s,
            obeyed=frozenset({"eval"}) if config.policy.eval_sampling.mode == "harness" else frozenset(),
        )


class Edge:
    """ASGI application. One per replica, used in one event loop."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: EdgeSettings,
        sessions: Sessions,
        index: SessionIndex,
        log: CallLogWriter,
        admission: Admission | None = None,
        recovery: Recovery | None = None,
        targets: Targets | None = None,
    ) -> None:
        self._recovery = recovery
        self._app, self._settings, self._sessions, self._index = app, settings, sessions, index
        self._admission = admission or Admission()
        self._pulse = Pulse(settings.keepalive_s)
        self._refusals = Refusals(index, log, settings.window)
        self._delivery = Delivery(index, log, settings.bodies)
        self._names = ModelNames(settings.served_name)
        self.under_way = UnderWay()
        self._targets = targets
        self._upstreams = Upstreams(index=index, log=log, refusals=self._refusals, under_way=self.under_way)

    # ---- for the control plane

    def live(self, session: str) -> int:
        """Requests of `session` that run or whose events are not all on disk yet."""
        return self.under_way.count(session)

    async def drained(self, session: str, timeout_s: float) -> bool:
        """Wait until no request of `session` is under way. False after `timeout_s`."""
        return await self.under_way.drained(session, timeout_s)

    def forget(self, session: str) -> None:
        """Drop what is held of a closed session."""
        self._upstreams.forget(session)

    def abort(self, session: str) -> int:
        """End the calls of `session` that other models are answering; returns how many. The engine's are not the edge's to end."""
        return self._upstreams.abort(session)

    # ---- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await probes.refuse_websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        path, token = split_prefix(scope["path"].removeprefix(scope.get("root_path", "")))
        dialect, request_id = dialects.of(path, headers), f"req_{uuid.uuid4().hex}"
        try:
            caller = Caller(path, dialect, verify(self._sessions, token, headers, scope), request_id)
        except UnknownSession as error:
            caller = Caller(path, dialect, None, request_id)
            await self._refusals.respond(caller, Refusal(401, f"Invalid API key: {error}", code="invalid_api_key"), scope, receive, send)
            return
        google = dialect.name == "gemini"
        probe = probes.answer(scope["method"], path, served_name=self._settings.served_name, window=self._settings.window, google=google)
        if probe is not None:
            probe.headers[probes.REPLICA] = self._index.replica
            await probe(scope, receive, send)
            return
        refusal = await self._meet(caller) or self._admit(caller, scope["method"])
        if refusal is not None or caller.session is None:
            refusal = refusal or Refusal(401, "Missing API key", code="invalid_api_key")
            await self._refusals.respond(caller, refusal, scope, receive, send)
            return
        client = Client(receive)
        self.under_way.enter(caller.session.session)
        try:
            await self._serve(caller, caller.session, scope, headers, client, send)
        except RecursionError:
            if client.passed_on:
                raise
            await self._refuse(caller, "body", Refusal(400, "The request body is nested too deeply"), scope, client, send)
        except Exception:
            if client.passed_on:
                raise
            logger.exception("%s could not be judged (%s)", caller.path, request_id)
            await self._refusals.respond(caller, self._refusals.engine_failure(caller), scope, client.replay(b""), send)
        finally:
            client.close()
            self.under_way.leave(caller.session.session)

    async def _meet(self, caller: Caller) -> Refusal | None:
        """Learn what other replicas recorded of the session."""
        if self._recovery is not None and caller.session is not None:
            try:
                await self._recovery.meet(caller.session.session)
            except CallLogError as error:
                logger.error("session %s: %s", caller.session.session, error)
                return Refusal(503, f"The recording cannot be read: {error}", code="server_error")
        return None

    def _admit(self, caller: Caller, method: str) -> Refusal | None:
        """Whether the route is open and the session may call."""
        if caller.dialect.route(caller.path) is None:
            return Refusal(404, f"Unknown route: {method} {caller.path}", code="unknown_url")
        if method != "POST":
            return Refusal(405, f"{caller.path} takes POST only", code="method_not_allowed")
        if caller.session is not None and self._index.closed(caller.session.session):
            return Refusal(403, f"Session {caller.session.session} is closed", code="session_closed")
        return None

    async def _serve(self, caller: Caller, session: Session, scope: Scope, headers: Headers, client: Client, send: Send) -> None:
        """An admitted request: read it, judge it, pass it on."""
        try:
            raw = await read_body(client, headers, self._settings.max_body_bytes)
        except Gone:
            return
        if isinstance(raw, Refusal):
            await self._refuse(caller, "body", raw, scope, client, send)
            return
        body = parse_object(raw)
        await caller.dialect.prepare()
        inner = body if body is None else caller.dialect.translate(body, caller.path, scope.get("query_string", b"").decode("latin-1"))
        if inner is None:
            await self._refuse(caller, "body", Refusal(400, "The request body is not a JSON object"), scope, client, send)
        elif late := self._admit(caller, "POST"):  # closed while the body came
            await self._refusals.respond(caller, late, scope, client.replay(b""), send)
        elif isinstance(inner, Refusal):
            await self._refuse(caller, "field", inner, scope, client, send)
        elif (target := self._target(caller, inner)) is not None:
            if refusal := target.refuse(caller.dialect.name, str(inner.body["model"])):
                await self._refuse(caller, "field", refusal, scope, client, send)
            else:
                await self._upstreams.serve(caller, session, target, inner.body, raw, scope, client, send)
        elif caller.dialect.route(caller.path) == "uncounted":
            changed = any([self._names.rename(inner.body)[0], caller.dialect.adapt(inner.body), inner.translated])
            sent = json.dumps(inner.body).encode() if changed else raw
            await self._pass_on(caller, self._tee(caller, None, scope, client, send), inner, scope, sent, client)
        elif limit := self._index.exhausted(session.session):
            await self._delivery.reach(session.session, limit)
            await self._refuse(caller, "limit", self._refusals.limit(caller.dialect, limit), scope, client, send)
        elif refusal := caller.dialect.refuse(inner.body):
            await self._refuse(caller, "field", refusal, scope, client, send)
        else:
            await self._call(caller, session, inner, raw, scope, headers, client, send)

    def _target(self, caller: Caller, inner: Inner) -> Target | None:
        """The server of another model that the request is for."""
        asks = self._targets and caller.dialect.route(caller.path) == "call"
        return self._targets.find(inner.body.get("model")) if self._targets and asks else None

    async def _call(
        self, caller: Caller, session: Session, inner: Inner, raw: bytes, scope: Scope, headers: Headers, client: Client, send: Send
    ) -> None:
        """A request for a completion. `raw` is the body as it came, `inner` what it says."""
        body, asked_model = inner.body, inner.body.get("model")
        forced = session.purpose not in self._settings.obeyed
        ignored = [*inner.ignored, *caller.dialect.unheeded(body, forced=forced)]
        renamed, side_model = self._names.rename(body)
        asked, clamped = caller.dialect.clamp(body, self._settings.window)
        adapted = caller.dialect.adapt(body)
        sent = json.dumps(body).encode() if renamed or clamped or adapted or inner.translated else raw
        kind, conversation = kinds.classify(headers, body, side_model=side_model)
        context = CallContext(
            session=session.session,
            purpose=session.purpose,
            dialect=caller.dialect.name,
            path=caller.path,
            streamed=bool(body.get("stream")),
            request_sha256=hashlib.sha256(raw).hexdigest(),
            kind=kind,
            conversation_hint=conversation,
            asked_tokens=asked,
            model=asked_model if isinstance(asked_model, str) else None,
            ignored=ignored,
            history=history.read(caller.dialect.name, body),
        )
        try:
            ticket = context.ticket = self._admission.arrive(session.session)
        except NotAdmitted as error:
            await self._refuse(caller, error.reason, self._refusals.not_admitted(caller, error), scope, client, send)
            return
        tee = self._tee(caller, context, scope, client, send)
        if context.streamed:
            self._pulse.add(tee)
        restore = identity.current.set(context)
        try:
            await self._pass_on(caller, tee, inner, scope, sent, client)
        finally:
            identity.current.reset(restore)
            ticket.leave()
            self._pulse.remove(tee)
            await self.under_way.whatever_happens(session.session, self._delivery.conclude(context, tee, raw))

    async def _pass_on(self, caller: Caller, tee: Tee, inner: Inner, scope: Scope, body: bytes, client: Client) -> None:
        """Let the app answer. What it raises is answered in the dialect's shape while nothing has been sent; a response that has begun
        is cut by the exception, so that the client cannot take it for whole."""
        client.passed_on = True
        try:
            await self._app(inner_scope(scope, inner.path, body), client.replay(body), inner.wrap(tee.send))
        except Exception:
            logger.exception("%s failed (%s)", caller.path, caller.request_id)
            if tee.ended or client.left:
                return
            if tee.begun:
                raise
            await tee.fail(500)

    def _tee(self, caller: Caller, context: CallContext | None, scope: Scope, client: Client, send: Send) -> Tee:
        answers = self._refusals.answers(caller, context, scope, client.replay(b""), send)
        keep = context is not None and self._settings.bodies is not None
        return Tee(client, send, caller.dialect.reply, answers, context=context, comment=caller.dialect.keep_alive, keep=keep)

    async def _refuse(self, caller: Caller, reason: str, refusal: Refusal, scope: Scope, client: Client, send: Send) -> None:
        await self._refusals.note(caller, reason, refusal.status)
        await self._refusals.respond(caller, refusal, scope, client.replay(b""), send)
