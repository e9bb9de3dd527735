"""What a request says about itself before it is judged: whose it is, its body, the model it names."""

from __future__ import annotations

import json
import logging
import re
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import Scope

from forge_ray.serve_proxy.dialects import Refusal
from forge_ray.serve_proxy.dialects.base import parse_object
from forge_ray.serve_proxy.dialects.fields import Json
from forge_ray.serve_proxy.exchange import Client, TooLarge
from forge_ray.serve_proxy.sessions import Session, Sessions, UnknownSession

logger = logging.getLogger(__name__)

SIDE_MODELS = 100
"""Names of other models that are remembered, so that each is warned of once."""
_HALF = re.compile(rb"\\u[dD](?:(?<=\\\\u.)|[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F](?<!\\u[dD][89abAB]..\\u[dD].))", re.DOTALL)
"""The escape of one half of a surrogate pair, or what looks like one behind a backslash that is escaped itself."""
_KEY_HEADERS = ("authorization", "x-api-key", "x-goog-api-key")


def split_prefix(path: str) -> tuple[str, str | None]:
    """`/s/<token>/v1/models` -> (`/v1/models`, `<token>`); any other path stays, with None."""
    if not path.startswith("/s/"):
        return path, None
    token, _, rest = path[3:].partition("/")
    return f"/{rest}", token


def verify(sessions: Sessions, token: str | None, headers: Headers, scope: Scope) -> Session | None:
    """The session of the path prefix, else of the first key that is one; None without any credentials. Raises `UnknownSession`."""
    if token is not None:
        return sessions.verify(token)
    keys = [headers[name].removeprefix("Bearer ").strip() for name in _KEY_HEADERS if name in headers]
    keys += parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [])  # Gemini's clients may put it there
    for number, key in enumerate(keys, start=1):
        try:
            return sessions.verify(key)
        except UnknownSession:
            if number == len(keys):
                raise
    return None


async def read_body(client: Client, headers: Headers, limit: int) -> bytes | Refusal:
    """The request's body of at most `limit` bytes. Raises `exchange.Gone`."""
    too_large = Refusal(413, f"The request body is above {limit} bytes", code="request_too_large")
    if headers.get("content-encoding", "identity") != "identity":
        return Refusal(415, "Content-Encoding is not supported: send the body as it is", code="unsupported_media_type")
    if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")) > limit:
        return too_large
    try:
        return whole_characters(await client.body(limit))
    except TooLarge:
        return too_large


def whole_characters(raw: bytes) -> bytes:
    """A body of JSON with U+FFFD for each half of a character. Programs in JavaScript cut texts by UTF-16 units, JSON carries the half that
    is left as an escape, and no tokenizer takes it. Written without escapes it would have come as U+FFFD."""
    if _HALF.search(raw) is None or (body := parse_object(raw)) is None:
        return raw
    return json.dumps(body, ensure_ascii=False).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


class ModelNames:
    """Serves any model name as `ours`."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._seen: set[str] = set()

    def rename(self, body: Json) -> tuple[bool, bool]:
        """Put our name into `body`. Returns whether it changed, and whether another model was meant: harnesses have other models for side
        calls. A provider's prefix (`openai/policy`) means ours."""
        name = body.get("model")
        if not isinstance(name, str) or name == self._ours:
            return False, False
        body["model"] = self._ours
        if name.rpartition("/")[2] == self._ours:
            return True, False
        if name not in self._seen and len(self._seen) < SIDE_MODELS:
            self._seen.add(name)
            logger.warning(
                "a harness asks for model %r: served as a side call (kind aux), not trained by default; main calls must ask for %r",
                name,
                self._ours,
            )
        return True, True
