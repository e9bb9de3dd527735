"""Where requests for other models go, and what of a request and a response may cross: as data, without any connection.

Two secrets must not meet: the session's token stays here, the upstream's key stays with the upstream. Headers therefore cross by lists of
names, in both directions; a header that nobody thought of stays behind. A body crosses byte for byte, unless the model has another name
there or log-probabilities have to be asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from forge_ray.config import Config, Upstream
from forge_ray.errors import UserError
from forge_ray.serve_proxy.dialects import Refusal
from forge_ray.serve_proxy.dialects.fields import Json

_SENT = ("accept", "user-agent", "anthropic-version", "anthropic-beta", "openai-beta")
_QUERY = ("beta", "api-version")
_RETURNED = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id", "request-id", "openai-processing-ms")
_RETURNED_PREFIXES = ("x-ratelimit-", "anthropic-ratelimit-")
_PATHS = {"chat": "/chat/completions", "completions": "/completions", "responses": "/responses", "messages": "/messages"}
_LOGPROBS = "message.output_text.logprobs"
HIDDEN = "***"


class Keys:
    """The upstreams' API keys by name in `proxy.upstreams`. They travel to a replica in its constructor's arguments, since Ray writes
    runtime environments into its logs; printed they show nothing."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = dict(keys)

    def __repr__(self) -> str:
        return f"Keys({', '.join(self._keys)})"

    def get(self, name: str) -> str | None:
        return self._keys.get(name)

    @classmethod
    def of(cls, config: Config, environment: Mapping[str, str] | None = None) -> Keys:
        """The keys in this process's environment. Raises `UserError` for a variable that is not set."""
        environment = os.environ if environment is None else environment
        found = {}
        for name, variable in wanted_keys(config):
            if not (key := environment.get(variable, "").strip()):
                raise UserError(f"${variable} is not set", where=f"proxy.upstreams.{name}.key_env", fix=f"export {variable}=…")
            found[name] = key
        return cls(found)


def wanted_keys(config: Config) -> Iterator[tuple[str, str]]:
    """`(upstream, environment variable)` of every upstream that wants a key."""
    return ((name, upstream.key_env) for name, upstream in config.proxy.upstreams.items() if upstream.key_env is not None)


@dataclass(frozen=True)
class Target:
    """One upstream, with its key."""

    name: str
    """Its key in `proxy.upstreams`."""
    settings: Upstream
    key: str | None = None

    def __repr__(self) -> str:
        return f"Target({self.name}, {self.settings.url})"

    def refuse(self, dialect: str, model: str) -> Refusal | None:
        """Why a request in `dialect` cannot go there."""
        if dialect in self.settings.dialects:
            return None
        spoken = ", ".join(self.settings.dialects)
        return Refusal(400, f"model {model!r} is served by another server, which does not speak the {dialect} dialect (it speaks {spoken})",
                       "model", "unsupported_dialect")  # fmt: skip

    def url(self, dialect: str, query: str) -> str:
        kept = [(name, value) for name, value in parse_qsl(query) if name in _QUERY]
        return self.settings.url.rstrip("/") + _PATHS[dialect] + (f"?{urlencode(kept)}" if kept else "")

    def headers(self, headers: Mapping[str, str], dialect: str) -> dict[str, str]:
        """Of a request. `headers`: the harness's, by lower-case name."""
        sent = {name: headers[name] for name in _SENT if name in headers}
        # The reply is read while it passes by.
        sent |= {"content-type": "application/json", "accept-encoding": "identity"}
        if self.key is not None:
            sent["authorization"] = f"Bearer {self.key}"
            if dialect == "messages":
                sent["x-api-key"] = self.key
        return sent | {name.lower(): value for name, value in self.settings.headers.items()}

    def body(self, dialect: str, body: Json, raw: bytes) -> bytes:
        """Of a request. `raw` as it came, `body` what it says."""
        changed: Json = {}
        if self.settings.model is not None and self.settings.model != body.get("model"):
            changed["model"] = self.settings.model
        if self.settings.logprobs:
            changed |= self._logprobs(dialect, body)
        return json.dumps({**body, **changed}, ensure_ascii=False).encode(errors="surrogatepass") if changed else raw

    def _logprobs(self, dialect: str, body: Json) -> Json:
        most, given = self.settings.top_logprobs, body.get("top_logprobs")
        more = most > (given if isinstance(given, int) else 0)
        if dialect == "chat":
            if body.get("logprobs") is False:
                return {}  # the harness says that it does not want them
            asked = {} if body.get("logprobs") else {"logprobs": True}
            return asked | ({"top_logprobs": most} if more else {})
        if dialect == "completions":
            return {"logprobs": most} if body.get("logprobs") is None else {}
        if dialect == "responses":
            included = body.get("include") or []
            asked = {} if not isinstance(included, list) or _LOGPROBS in included else {"include": [*included, _LOGPROBS]}
            return asked | ({"top_logprobs": most} if more else {})
        return {}

    def returned(self, headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
        """Headers of a response, without those that stay behind."""
        return [
            (name.lower().encode(), value.encode("latin-1", "replace"))
            for name, value in headers
            if (name.lower() in _RETURNED or name.lower().startswith(_RETURNED_PREFIXES)) and not self._shows_key(value)
        ]

    def without_key(self, content: bytes) -> bytes:
        """An error's text; some servers quote the key that they were given."""
        return content.replace(self.key.encode(), HIDDEN.encode()) if self.key else content

    def _shows_key(self, value: str) -> bool:
        return self.key is not None and self.key in value


class Targets:
    """All upstreams of a run. `keys` as `Keys.of` gave them where the run was started."""

    def __init__(self, config: Config, keys: Keys | None = None) -> None:
        self._config = config
        self._targets = {name: Target(name, upstream, keys and keys.get(name)) for name, upstream in config.proxy.upstreams.items()}

    def __bool__(self) -> bool:
        return bool(self._targets)

    def find(self, model: Any) -> Target | None:
        """The upstream of a model name; None: the policy answers."""
        name = self._config.upstream(model) if isinstance(model, str) else None
        return None if name is None else self._targets[name]
