"""Session tokens: who a request belongs to, signed, so that any replica can check one without asking anybody.

A token is lower-case letters and digits only, because it must survive as a path segment, as an HTTP key and in clients that strip
punctuation from keys. It is `base32(HMAC-SHA256(secret, payload)[:16]) + base32(payload)`, and exactly one spelling of it is valid.
It tells one rollout from another; it is no secret kept from the rollout that holds it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections import OrderedDict
from dataclasses import dataclass

from forge_ray.errors import ForgeRayError
from forge_ray.rollout import Purpose

_PURPOSES: dict[Purpose, bytes] = {"train": b"t", "eval": b"e"}
_SIGNATURE_BYTES = 16
_SIGNATURE_CHARS = 26
_KEPT = 4096
"""Valid tokens that are remembered: a session sends many requests with one."""


class UnknownSession(ForgeRayError):
    """The token is not one that this run issued."""


@dataclass(frozen=True)
class Session:
    """A session id (a rollout's id) and what its calls are for."""

    session: str
    purpose: Purpose


class Sessions:
    """Issues and checks the tokens of one run. `secret`: at least 16 bytes, the same for every process and incarnation of the run."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ValueError(f"the session secret has {len(secret)} bytes, not at least 16")
        self._secret = secret
        self._checked: OrderedDict[str, Session] = OrderedDict()

    def issue(self, session: str, purpose: Purpose) -> str:
        """The token of `session`: `[a-z0-9]+`, about 26 + 1.6 × (bytes of the id) characters."""
        payload = _PURPOSES[purpose] + session.encode()
        return _encode(self._sign(payload)) + _encode(payload)

    def verify(self, token: str) -> Session:
        """The session that `token` was issued for. Raises `UnknownSession` for everything else."""
        known = self._checked.get(token)
        if known is not None:
            return known
        try:
            payload = _decode(token[_SIGNATURE_CHARS:])
            session = payload[1:].decode()
        except (ValueError, binascii.Error):
            raise UnknownSession("the session token is malformed") from None
        expected = _encode(self._sign(payload)) + _encode(payload)
        if not hmac.compare_digest(expected.encode(), token.encode()):
            raise UnknownSession("the session token is not one of this run")
        found = self._checked[token] = Session(session, next(purpose for purpose, mark in _PURPOSES.items() if mark == payload[:1]))
        if len(self._checked) > _KEPT:
            self._checked.popitem(last=False)
        return found

    def _sign(self, payload: bytes) -> bytes:
        return hmac.new(self._secret, payload, hashlib.sha256).digest()[:_SIGNATURE_BYTES]


def _encode(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _decode(text: str) -> bytes:
    if not text or not text.isascii() or not text.isalnum():
        raise ValueError(text)
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))
