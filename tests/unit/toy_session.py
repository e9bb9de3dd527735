"""A session of the index over the toy chat, asked in the dialects' own bodies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_ray.config import Limits
from forge_ray.serve_proxy import history, kinds
from forge_ray.serve_proxy.placing import Asked, Placement
from forge_ray.serve_proxy.session_index import SessionIndex
from tests.unit.toy_chat import END, ToyReader, encode, pieces, render, say


@dataclass
class Got:
    """What became of one request."""

    call: str
    kind: str
    conversation: str
    splice: str
    reason: str | None
    spawned_by: str | None
    parent: str | None


@dataclass
class ToySession:
    """One session."""

    index: SessionIndex = field(default_factory=lambda: SessionIndex("r", Limits()))
    placed: dict[str, Placement] = field(default_factory=dict)
    corrected: dict[str, str] = field(default_factory=dict)
    """Kinds that were corrected, by call."""

    def __post_init__(self) -> None:
        self.index.reader = ToyReader()

    def ask(
        self,
        dialect: str,
        body: dict[str, Any],
        said: str = "ok",
        *,
        headers: Mapping[str, str] | None = None,
        issued: Sequence[str] = (),
        status: str = "finished",
        delivered: bool = True,
        side_model: bool = False,
    ) -> Got:
        """One request and its reply, which is `said` in the tokenizer's own tokens."""
        kind, hint = kinds.classify(headers or {}, body, side_model=side_model)
        placed = self.index.find("s", prompt(dialect, body), Asked(history.read(dialect, body), kind, hint, issued=list(issued)))
        call = f"c{len(self.placed) + 1}"
        self.index.enter("s", call, placed)
        self.placed[call] = placed
        self.corrected.update(placed.verdict.corrections)
        ids = encode(said) + (pieces(END) if status == "finished" else [])
        self.index.sampled("s", len(ids))
        self.index.end("s", call, ids, status, placed.verdict.kind, float(len(self.placed)))
        if delivered:
            self.index.delivered("s", call, "answer")
        else:
            self.index.undelivered("s", [call])
        verdict = placed.verdict
        return Got(call, verdict.kind, placed.conversation, placed.splice, placed.reason, verdict.spawned_by, placed.parent)


def prompt(dialect: str, body: Mapping[str, Any]) -> list[int]:
    """What the toy template makes of a body; a system message inside the conversation stays where it is."""
    system, messages = "", []
    for role, content in _messages(dialect, body):
        if role == "system" and not messages:
            system += content
        else:
            messages.append({"role": role, "content": content})
    tools = "".join(sorted(_name(tool) for tool in body.get("tools") or ()))
    merged: list[dict[str, str]] = []
    for message in messages:
        if merged and message["role"] == "assistant" and merged[-1]["role"] == "assistant" and dialect == "responses":
            merged[-1]["content"] += message["content"]
        else:
            merged.append(message)
    return render(merged, system=system, tools=tools)


def _messages(dialect: str, body: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    if dialect == "responses":
        for item in body["input"]:
            kind = item.get("type", "message")
            if kind == "function_call":
                found.append(("assistant", say("", (item["name"], item["arguments"]))))
            elif kind == "function_call_output":
                found.append(("user", item["output"]))
            elif kind == "reasoning":
                found.append(("assistant", say("", thinking=item["content"][0]["text"])))
            else:
                found.append(("system" if item["role"] == "developer" else item["role"], _text(item["content"])))
        return found
    if dialect == "messages":
        for block in body.get("system") or ():
            if not block["text"].startswith("x-anthropic-billing-header"):
                found.append(("system", block["text"]))
    for message in body["messages"]:
        if message["role"] == "assistant":
            found.append(("assistant", _reply(message)))
        else:
            found.append(("user" if message["role"] == "tool" else message["role"], _text(message["content"])))
    return found


def _reply(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    thinking = message.get("reasoning_content") or ""
    if isinstance(content, list):
        calls += [(block["name"], json.dumps(block["input"])) for block in content if block["type"] == "tool_use"]
        thinking = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    return say(_text([block for block in content if "text" in block] if isinstance(content, list) else content), *calls, thinking=thinking)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(block["text"] if "text" in block else _text(block.get("content", "")) for block in content)


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("name") or tool["function"]["name"])
