"""Items and tools of the responses dialect: which vLLM's server takes, which are put into the form that it takes, which are refused.

vLLM renders functions, custom tools (as a function of one text) and namespaces (`multi_agent_v1__spawn_agent`), and gives the model's calls
of them back under their own kinds. Tools that OpenAI's servers would run are not shown to the model. Tools that arrive in the middle of the
input (`additional_tools`, the result of a tool search) are added to the request's tools, the only place where a chat template looks.
"""

from __future__ import annotations

import json
from typing import Any

from forge_ray.serve_proxy.dialects.fields import Json, objects, unsupported
from forge_ray.serve_proxy.dialects.refusal import Refusal

HOSTED = ("web_search", "file_search", "tool_search", "code_interpreter", "image_generation", "mcp", "programmatic_tool_calling")
"""Beginnings of the types of tools that the client does not run (or, `tool_search`, with which it finds more of its own)."""
ITEMS = ("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
"""Types of input items that vLLM's server renders."""
CONVERTED = ("additional_tools", "tool_search_call", "tool_search_output")
"""Types that are put into that form."""
_CALLABLE = ("function", "custom", "namespace")


def hosted(tool: Json) -> bool:
    return str(tool.get("type", "")).startswith(HOSTED)


def refuse(body: Json) -> Refusal | None:
    """Items that cannot be rendered and tools that cannot be called, by their index."""
    items = body.get("input")
    if isinstance(items, list):
        for number, item in enumerate(items):
            if not isinstance(item, dict):
                return Refusal(400, f"Invalid input[{number}]: an item is an object", f"input[{number}]", "invalid_value")
            kind = item.get("type") or ("message" if "role" in item else None)
            if kind not in ITEMS and kind not in CONVERTED:
                return unsupported(f"input[{number}]", f"an item of type {kind!r} cannot be shown to the model")
            if (wrong := _tools(_tools_of(item), f"input[{number}].tools")) is not None:
                return wrong
    if (wrong := _tools(objects(body.get("tools")), "tools")) is not None:
        return wrong
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") not in ("function", "custom"):
        return unsupported("tool_choice", f"a choice of type {choice.get('type')!r} cannot be kept to")
    return None


def _tools(tools: list[Json], where: str) -> Refusal | None:
    for number, tool in enumerate(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and kind not in _CALLABLE and not hosted(tool):
            return unsupported(f"{where}[{number}]", f"a tool of type {kind!r} brings no schema that the model could be told")
        if kind == "namespace":
            for place, inner in enumerate(objects(tool.get("tools"))):
                if inner.get("type") != "function":
                    return unsupported(
                        f"{where}[{number}].tools[{place}]", f"a namespace can hold functions only, not {inner.get('type')!r}"
                    )
    return None


def unheeded(body: Json) -> list[str]:
    """What in tools and items has no effect, by name."""
    tools = objects(body.get("tools"))
    names = []
    for item in objects(body.get("input")):
        tools += _tools_of(item)
        if item.get("type") == "reasoning" and item.get("encrypted_content"):
            names.append("input: encrypted_content")
    return names + [f"tools: {tool['type']}" for tool in tools if hosted(tool)]


def adapt(body: Json) -> bool:
    """Put items and tools into the form that vLLM's server takes; whether anything changed."""
    changed, found = False, []
    items = body.get("input")
    if isinstance(items, list):
        kept = []
        for item in items:
            found += _tools_of(item)
            new = _item(item)
            changed = changed or new is not item
            if new is not None:
                kept.append(new)
        body["input"] = kept
    tools = body.get("tools")
    if not isinstance(tools, list) and not found:
        return changed
    old = tools if isinstance(tools, list) else []
    declared = {_key(tool) for tool in objects(old)}
    later: dict[str, Json] = {}  # what is declared already, or found twice, is there once
    for tool in found:
        if (key := _key(tool)) not in declared:
            later.setdefault(key, tool)
    new_tools = [_tool(tool) for tool in (*old, *later.values()) if not (isinstance(tool, dict) and hosted(tool))]
    if len(new_tools) != len(old) or any(new is not tool for new, tool in zip(new_tools, old, strict=True)):
        body["tools"], changed = new_tools, True
    return changed


def _key(tool: Json) -> str:
    return repr((tool.get("type"), tool.get("name")))


def _tool(tool: Any) -> Any:
    """A custom tool with a grammar is declared as free text: the grammar would mask the model's own choice, and vLLM refuses it."""
    form = tool.get("format") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    return {**tool, "format": {"type": "text"}} if isinstance(form, dict) and form.get("type") == "grammar" else tool


def _tools_of(item: Json) -> list[Json]:
    """Tools that an item brings along."""
    return objects(item.get("tools")) if item.get("type") in ("additional_tools", "tool_search_output") else []


def _item(item: Json) -> Json | None:
    """The item as vLLM takes it: the same object where nothing is to be done, None where it adds nothing."""
    kind = item.get("type")
    if kind == "additional_tools":
        return None
    if kind == "tool_search_call":
        arguments = json.dumps(item.get("arguments") or {})
        return {"type": "function_call", "call_id": _call_id(item), "name": "tool_search", "arguments": arguments}
    if kind == "tool_search_output":
        names = [tool.get("name") for tool in _tools_of(item)]
        return {"type": "function_call_output", "call_id": _call_id(item), "output": json.dumps({"tools": names})}
    if kind == "reasoning":
        return _reasoning(item)
    if item.get("role") == "assistant" and kind in (None, "message"):
        return _assistant(item)
    return item


def _call_id(item: Json) -> str:
    return str(item.get("call_id") or item.get("id") or "tool_search")


def _reasoning(item: Json) -> Json:
    """Encrypted reasoning was another server's; what is readable beside it stays. vLLM reads the first text only."""
    new = dict(item)
    if new.get("encrypted_content"):
        del new["encrypted_content"]
    if not isinstance(new.get("summary"), list):
        new["summary"] = []
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = objects(new.get(field))
        if len(parts) > 1:
            new[field] = [{"type": kind, "text": "\n".join(str(part.get("text", "")) for part in parts)}]
    return new if new != item else item


def _assistant(item: Json) -> Json | None:
    """Clients return their assistant items without `type`, with nulls, or with an empty `content`. vLLM reads the first part only."""
    content = item.get("content")
    if not content:
        return None
    new = {"type": "message", **{name: value for name, value in item.items() if value is not None}}
    parts = objects(content)
    if isinstance(content, list) and (len(parts) > 1 or parts[0].get("type") != "output_text"):
        texts = [str(part.get("text") or part.get("refusal") or "") for part in parts]
        new["content"] = [{"type": "output_text", "text": "\n".join(texts), "annotations": []}]
    return new if isinstance(content, list) and new != item else item
