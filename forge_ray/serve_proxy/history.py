"""What a request says about the conversation so far, in one form for every dialect.

A history is read from the parsed body at a cost of some microseconds per item: every item is reduced to a digest, texts are hashed and
never copied. Left out is what harnesses change from request to request without changing what is said: `cache_control`, Claude Code's
billing nonce, a text given as a list of one text block. Ids are compared without `_`, `-` and `.`, which some harnesses strip.

Digests are Python's own hashes: they hold within one process, which is where the recorded histories are, and are never written down.
A body that is no request of the dialect gives what can be read of it: the server behind refuses it in its own words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_ray.serve_proxy.canonical_json import Schema
from forge_ray.serve_proxy.dialects.base import Json, without_nonce
from forge_ray.serve_proxy.ids import plain
from forge_ray.serve_proxy.turns import Turn

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[Any, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
_NONCE = "x-anthropic-billing-header:"


@dataclass(slots=True)
class History:
    """One request's history. Items begin after the leading system messages."""

    system: int
    """Digest of the system text: the dialect's own field and the messages before the first one of another role."""
    tools: int
    """Digest of the declared tools; 0: none are declared."""
    roles: list[Role] = field(default_factory=list)
    prints: list[int] = field(default_factory=list)
    """Digest of each item, its role included."""
    returned: set[str] = field(default_factory=set)
    """Ids of tool calls and items in it, in plain form."""
    first: int = 0
    """Place of the first item in the harness's own list."""
    items: Sequence[Any] = ()
    """The items as they came, held while the request runs."""
    declared: Sequence[Any] = ()
    """The tools as they came."""
    dialect: str = "chat"

    @property
    def head(self) -> tuple[int, int]:
        return self.system, self.tools

    @property
    def opening(self) -> int | None:
        """Digest of the first user item."""
        return self.prints[self.roles.index("user")] if "user" in self.roles else None

    @property
    def carries_replies(self) -> bool:
        return "assistant" in self.roles

    def opening_text(self) -> str:
        """All user text before the first reply."""
        texts = []
        for role, item in zip(self.roles, self.items, strict=True):
            if role == "assistant":
                break
            if role == "user":
                texts.append(text_of(item.get("content")) if isinstance(item, dict) else str(item))
        return "\n".join(texts)

    def reply(self, index: int) -> Turn | None:
        """The reply of which item `index` is the first part; None where that item is none of a reply."""
        turn: Turn | None = None
        for role, item in zip(self.roles[index:], self.items[index:], strict=True):
            if role != "assistant":
                break
            part = _responses_turn(item) if self.dialect == "responses" else _message_turn(item)
            turn = part if turn is None else turn.plus(part)
        return turn

    def schemas(self) -> dict[str, Schema]:
        """Schema of the arguments of every declared tool, by the name that the model sees."""
        return dict(declared_tools(self.declared))


def read(dialect: str, body: Json) -> History | None:
    """The history in a request's body (parsed); None where the dialect has none (a plain prompt) or the body is none of it."""
    try:
        if dialect == "responses":
            return _responses(body)
        if isinstance(body.get("messages"), list):
            return _messages(body, anthropic=dialect == "messages")
    except TypeError:  # a list or an object where the dialect has a name: refused behind us
        return None
    return None


def _messages(body: Json, *, anthropic: bool) -> History:
    messages, tools = body["messages"], body.get("tools")
    system: list[str] = []
    if anthropic:
        system += _system_texts(body.get("system"))
    first = 0
    while first < len(messages) and _role(messages[first]) == "system" and not anthropic:
        system += _system_texts(messages[first].get("content"))
        first += 1
    items = messages[first:] if first else messages
    found = History(hash(tuple(system)), _tools_print(tools), first=first, items=items, declared=_list(tools), dialect="chat")
    add_role, add_print, returned = found.roles.append, found.prints.append, found.returned
    for item in items:
        role = _role(item)
        add_role(role)
        add_print(_message_print(role, item, returned))
    return found


def _message_print(role: Role, item: Any, returned: set[str]) -> int:
    """Digest of a message of chat or messages; its ids go to `returned`."""
    if not isinstance(item, dict):
        return hash((role, repr(item)))
    content = item.get("content")
    said: Any = content if isinstance(content, str) else _blocks_print(content, returned)
    if role == "user":
        return hash((role, said))
    calls = item.get("tool_calls")
    if calls and isinstance(calls, list):
        prints = []
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                prints.append((function.get("name"), _value_print(function.get("arguments")), _note(call.get("id"), returned)))
        said = (said or "", tuple(prints))
    if role == "tool":
        said = (said, _note(item.get("tool_call_id"), returned))
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    return hash((role, said or "", reasoning if isinstance(reasoning, str) else None))


def _blocks_print(content: Any, returned: set[str]) -> Any:
    """Content blocks in a form to hash; one text block is that text."""
    if not isinstance(content, list):
        return None if content is None else _value_print(content)
    if len(content) == 1 and isinstance(content[0], dict) and isinstance(text := content[0].get("text"), str):
        return text
    return tuple([_block_print(block, returned) for block in content])


def _block_print(block: Any, returned: set[str]) -> Any:
    if not isinstance(block, dict):
        return _value_print(block)
    kind = block.get("type")
    if isinstance(text := block.get("text"), str):
        return text
    if kind == "tool_use":
        return block.get("name"), _value_print(block.get("input")), _note(block.get("id"), returned)
    if kind == "tool_result":
        content = block.get("content")
        said = content if isinstance(content, str) else _blocks_print(content, returned)
        return "result", said, _note(block.get("tool_use_id"), returned)
    if kind == "thinking":
        return "thinking", block.get("thinking")
    return _value_print({name: value for name, value in block.items() if name != "cache_control"})


def _responses(body: Json) -> History:
    given, tools = body.get("input"), body.get("tools")
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else _list(given)
    system = _system_texts(body.get("instructions"))
    first = 0
    while first < len(items) and _role(items[first]) == "system":
        system += _system_texts(items[first].get("content"))
        first += 1
    items = items[first:] if first else items
    found = History(hash(tuple(system)), _tools_print(tools), first=first, items=items, declared=_list(tools), dialect="responses")
    for item in items:
        role, value = _response_item(item, found.returned)
        found.roles.append(role)
        found.prints.append(hash((role, value)))
    return found


def _response_item(item: Any, returned: set[str]) -> tuple[Role, Any]:
    if not isinstance(item, dict):
        return "user", repr(item)
    kind = str(item.get("type", "message"))
    if kind.endswith("_output"):
        output = item.get("output")
        said = output if isinstance(output, str) else _blocks_print(output, returned)
        return "tool", (said, _note(item.get("call_id"), returned))
    _note(item.get("id"), returned)
    if kind.endswith("_call"):
        given = item.get("arguments", item.get("input"))
        return "assistant", (item.get("namespace"), item.get("name"), _value_print(given), _note(item.get("call_id"), returned))
    if kind == "reasoning":
        return "assistant", (_reasoning_text(item),)
    content = item.get("content")
    return _role(item), content if isinstance(content, str) else _blocks_print(content, returned)


# ---- replies as a harness keeps them


def _message_turn(item: Any) -> Turn:
    """An assistant message of chat or messages."""
    content, texts, thoughts, calls = item.get("content"), [], [], []
    for block in content if isinstance(content, list) else [{"text": content}]:
        if not isinstance(block, dict):
            continue
        if block.get("type") == "tool_use":
            calls.append((str(block.get("name")), json.dumps(block.get("input"))))
        elif isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif isinstance(block.get("text"), str):
            texts.append(block["text"])
    for call in _list(item.get("tool_calls")):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            calls.append((str(function.get("name")), _json_text(function.get("arguments"))))
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        thoughts.append(reasoning)
    return Turn("\n".join(thoughts), "".join(texts), tuple(calls))


def _responses_turn(item: Any) -> Turn:
    kind = str(item.get("type", "message"))
    if kind.endswith("_call"):
        name = f"{item['namespace']}__{item.get('name')}" if item.get("namespace") else str(item.get("name"))
        given = item["arguments"] if "arguments" in item else {"input": item.get("input")}
        return Turn(calls=((name, _json_text(given)),))
    if kind == "reasoning":
        return Turn(reasoning=_reasoning_text(item))
    return Turn(text=text_of(item.get("content")))


def _reasoning_text(item: Mapping[str, Any]) -> str:
    return text_of(item.get("content")) or text_of(item.get("summary"))


# ---- tools


def declared_tools(tools: Sequence[Any]) -> Iterator[tuple[str, Schema]]:
    """(name as the model sees it, schema of its arguments) of every function that a request declares, in any dialect."""
    for tool in tools:
        if not isinstance(tool, dict):
            continue
        if tool.get("type") == "namespace":
            for name, schema in declared_tools(_list(tool.get("tools"))):
                yield f"{tool.get('name')}__{name}", schema
            continue
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        if isinstance(name := function.get("name"), str):
            schema = function.get("parameters") or function.get("input_schema")
            yield name, schema if isinstance(schema, dict) else {}


def _tools_print(tools: Any) -> int:
    if not isinstance(tools, list) or not tools:
        return 0
    kept = [
        {name: value for name, value in tool.items() if name != "cache_control"}
        if isinstance(tool, dict) and "cache_control" in tool
        else tool
        for tool in tools
    ]
    return hash(json.dumps(kept)) or 1


# ---- small parts


def text_of(content: Any) -> str:
    """All text in a message's content, tool results left out."""
    if isinstance(content, str):
        return content
    texts = [block["text"] for block in _list(content) if isinstance(block, dict) and isinstance(block.get("text"), str)]
    return "\n".join(texts)


def _system_texts(content: Any) -> list[str]:
    if isinstance(content, str):
        rest = without_nonce(content)
        return [content if rest is None else rest]
    blocks = (block.get("text") for block in _list(content) if isinstance(block, dict))
    return [text for text in blocks if isinstance(text, str) and not text.startswith(_NONCE)]


def _role(item: Any) -> Role:
    return _ROLES.get(item.get("role"), "user") if isinstance(item, dict) else "user"


def _note(name: Any, returned: set[str]) -> str | None:
    if not isinstance(name, str):
        return None
    found = plain(name)
    returned.add(found)
    return found


def _value_print(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
