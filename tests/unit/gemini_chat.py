"""Gemini requests of tests, and what becomes of one: the chat request, the fields that were ignored, or the refusal."""

from __future__ import annotations

from typing import Any

from forge_ray.serve_proxy.dialects.gemini_request import chat_request
from forge_ray.serve_proxy.dialects.refusal import Refusal

HI: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
TOOLS = [{"functionDeclarations": [{"name": name} for name in ("f", "g", "h")]}]


def chat(body: dict[str, Any]) -> dict[str, Any]:
    made = chat_request(body, "policy")
    assert not isinstance(made, Refusal), made
    return made[0]


def ignored(body: dict[str, Any]) -> list[str]:
    made = chat_request(body, "policy")
    assert not isinstance(made, Refusal), made
    return made[1]


def refused(body: dict[str, Any]) -> Refusal:
    made = chat_request(body, "policy")
    assert isinstance(made, Refusal), made
    assert made.status == 400
    return made


def response(name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": value, **more}}


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **more}}
