"""Harmless requests that clients make beside their calls: answered here, never recorded, never passed on."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forge_ray.serve_proxy.dialects.gemini import model_card

REPLICA = "x-forge-ray-replica"
"""Header of a probe's answer: the id of the replica that gave it."""
_LISTS = ("/models", "/v1/models", "/api/v1/models")


def answer(method: str, path: str, *, served_name: str, window: int, google: bool = False) -> Response | None:
    """The answer to a probe, or None where the request is none. `google`: from a client of Gemini's API, which has a list of models
    at the same place as OpenAI's, in another form."""
    read = method in ("GET", "HEAD")
    if read and google and (gemini := model_card(path, served_name, window)) is not None:
        return JSONResponse(gemini)
    if read and path in _LISTS:
        model = _model(served_name, window)
        return JSONResponse({"object": "list", "data": [model], "has_more": False, "first_id": served_name, "last_id": served_name})
    if read and any(path.startswith(f"{listing}/") for listing in _LISTS):
        return JSONResponse(_model(path.split("/models/", 1)[1], window))
    if read and path in ("/health", "/api/hello", "/"):
        return Response(status_code=200)
    if method == "GET" and path.endswith("/responses"):
        # A client that tries a WebSocket first falls back to POST at once on this status, and only after seconds on any other.
        return _upgrade_required()
    return None


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Turn down a WebSocket handshake with the status that makes clients use POST at once, where the server can send one."""
    await receive()
    if "websocket.http.response" in scope.get("extensions", {}):
        await _upgrade_required()(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008})


def _upgrade_required() -> Response:
    return Response("Use POST", status_code=426, headers={"upgrade": "HTTP/1.1", "connection": "Upgrade"})


def _model(name: str, window: int) -> dict[str, Any]:
    """A model card that clients of both the OpenAI and the Anthropic API can read."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "forge-ray", "max_model_len": window}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
