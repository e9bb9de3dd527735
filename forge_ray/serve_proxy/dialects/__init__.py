"""The wire protocols that the proxy speaks; one module each."""

from collections.abc import Mapping

from forge_ray.serve_proxy.dialects.base import Dialect, Overflow, Refusal, Reply, read_overflow
from forge_ray.serve_proxy.dialects.chat import Chat, Completions
from forge_ray.serve_proxy.dialects.gemini import Gemini, speaks
from forge_ray.serve_proxy.dialects.messages import Messages
from forge_ray.serve_proxy.dialects.responses import Responses

ALL: tuple[Dialect, ...] = (Chat(), Completions(), Responses(), Messages(), Gemini())
ROUTES: dict[str, Dialect] = {path: dialect for dialect in ALL for path in (dialect.path, *dialect.uncounted)}
_GEMINI = ALL[-1]


def of(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect that a request to any path expects its errors in: by route, else by the protocol's headers, else OpenAI's."""
    if path in ROUTES:
        return ROUTES[path]
    if speaks(path) or "x-goog-api-key" in headers:
        return _GEMINI
    return ROUTES["/v1/messages"] if "anthropic-version" in headers or path.startswith("/v1/messages") else ROUTES["/v1/chat/completions"]


__all__ = ["ALL", "ROUTES", "Dialect", "Overflow", "Refusal", "Reply", "of", "read_overflow"]
