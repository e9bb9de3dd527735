"""A harness in small that speaks three dialects: it asks, reads the reply, keeps of it what a test says, and asks again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.integration.edge_rig import EdgeRig

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "old": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "number"}},
        "replace_all": {"type": "boolean", "default": False},
    },
}


@dataclass
class Said:
    """A reply as the harness got it."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """(id, name, arguments)."""
    stop: Any = None


@dataclass
class Talk:
    """One conversation. `write` makes a text of arguments, where the dialect has a text."""

    rig: EdgeRig
    session: str
    dialect: str
    stream: bool
    system: str = "You edit files."
    tools: bool = True
    write: Callable[[Any], str] = json.dumps
    items: list[Any] = field(default_factory=list)

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def keep(self, said: Said) -> None:
        """Put a reply into the history."""
        if self.dialect == "messages":
            blocks: list[Any] = [{"type": "thinking", "thinking": said.reasoning, "signature": "s"}] if said.reasoning else []
            blocks += [{"type": "text", "text": said.text}] if said.text else []
            blocks += [{"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in said.calls]
            self.items.append({"role": "assistant", "content": blocks})
        elif self.dialect == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": said.text}
            if said.reasoning:
                message["reasoning_content"] = said.reasoning
            if said.calls:
                message["tool_calls"] = [
                    {"id": id, "type": "function", "function": {"name": name, "arguments": self.write(given)}}
                    for id, name, given in said.calls
                ]
            self.items.append(message)
        else:
            if said.reasoning:
                content = [{"type": "reasoning_text", "text": said.reasoning}]
                self.items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
            if said.text:
                content = [{"type": "output_text", "text": said.text, "annotations": []}]
                self.items.append({"type": "message", "role": "assistant", "content": content})
            for id, name, given in said.calls:
                self.items.append({"type": "function_call", "call_id": id, "name": name, "arguments": self.write(given)})

    def result(self, id: str, text: str) -> None:
        if self.dialect == "messages":
            self.items.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})
        elif self.dialect == "chat":
            self.items.append({"role": "tool", "tool_call_id": id, "content": text})
        else:
            self.items.append({"type": "function_call_output", "call_id": id, "output": text})

    async def ask(self, **more: Any) -> Said:
        """One request."""
        answer = await self.rig.post(self.session, PATHS[self.dialect], self.body() | more)
        assert answer.status_code == 200, answer.text
        body = answer.json() if not self.stream else None
        if self.dialect == "messages":
            return _messages(body if body is not None else _message_of(events(answer.text)))
        if self.dialect == "chat":
            return _chat(body["choices"][0] if body is not None else _choice_of(events(answer.text)))
        done = [event["response"] for event in events(answer.text) if event["type"] in ("response.completed", "response.incomplete")]
        return _response(body if body is not None else done[0])

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "policy", "stream": self.stream}
        if self.dialect == "messages":
            body |= {"messages": self.items, "system": self.system, "max_tokens": 200}
            tool: dict[str, Any] = {"name": "edit", "input_schema": SCHEMA}
        elif self.dialect == "chat":
            body |= {"messages": [{"role": "system", "content": self.system}, *self.items], "max_tokens": 200}
            tool = {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}}
        else:
            body |= {"input": self.items, "instructions": self.system, "max_output_tokens": 200}
            tool = {"type": "function", "name": "edit", "parameters": SCHEMA}
        return body | ({"tools": [tool]} if self.tools else {})


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def _messages(body: dict[str, Any]) -> Said:
    said = Said(stop=(body.get("stop_reason"), body.get("stop_sequence")))
    for block in body["content"]:
        if block["type"] == "tool_use":
            said.calls.append((block["id"], block["name"], block["input"]))
        said.text += block.get("text") or ""
        said.reasoning += block.get("thinking") or ""
    return said


def _message_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: dict[int, dict[str, Any]] = {}
    message: dict[str, Any] = {}
    for event in found:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["json"] += delta.get("partial_json") or ""
            for name in ("text", "thinking"):
                block[name] = (block.get(name) or "") + (delta.get(name) or "")
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for block in blocks.values():
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return {**message, "content": list(blocks.values())}


def _chat(choice: dict[str, Any]) -> Said:
    message = choice["message"]
    calls = [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    return Said(message.get("content") or "", message.get("reasoning") or "", calls, (choice["finish_reason"], choice.get("stop_reason")))


def _choice_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    choice: dict[str, Any] = {"message": message, "finish_reason": None}
    for part in (part for event in found for part in event.get("choices") or ()):
        delta = part.get("delta") or {}
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            if call.get("id"):
                message["tool_calls"].append({"id": call["id"], "function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][-1]["function"]["arguments"] += call["function"].get("arguments") or ""
        choice |= {name: part[name] for name in ("finish_reason", "stop_reason") if part.get(name) is not None}
    return choice


def _response(body: dict[str, Any]) -> Said:
    said = Said(stop=(body["status"], None))
    for item in body["output"]:
        if item["type"] == "function_call":
            said.calls.append((item["call_id"], item["name"], json.loads(item["arguments"])))
        elif item["type"] == "reasoning":
            said.reasoning += "".join(part["text"] for part in item.get("content") or ())
        else:
            said.text += "".join(part["text"] for part in item["content"])
    return said
