"""OpenAI responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator

from forge_ray.conformance.dialects.base import Json, Usage, fresh, slices, sse, text_of
from forge_ray.conformance.dialects.chat import Chat
from forge_ray.conformance.reply import Reply, ToolCall


class Responses(Chat):
    name, routes = "responses", ("/responses",)

    def messages(self, body: Json) -> Iterable[tuple[bool, str]]:
        yield False, text_of(body.get("instructions"))
        items = body.get("input")
        for item in [{"content": items}] if isinstance(items, str) else items or ():
            kind = item.get("type", "message")
            if kind == "reasoning":
                yield True, text_of(item.get("content") or item.get("summary"))
            elif kind.endswith("_call"):
                yield True, json.dumps(item, ensure_ascii=False)
            elif kind.endswith("_output"):
                yield False, text_of(item.get("output"))
            else:
                yield item.get("role") == "assistant", text_of(item.get("content"))

    def unary(self, reply: Reply, usage: Usage, body: Json) -> Json:
        return self._response(body, "completed", self._items(reply, body), usage)

    def events(self, reply: Reply, usage: Usage, body: Json) -> Iterator[bytes]:
        opened = self._response(body, "in_progress", [], None)
        number = iter(range(1_000_000))

        def event(kind: str, **fields: object) -> bytes:
            return sse({"type": kind, "sequence_number": next(number), **fields}, kind)

        yield event("response.created", response=opened)
        yield event("response.in_progress", response=opened)
        items = self._items(reply, body)
        for index, item in enumerate(items):
            place = {"item_id": item["id"], "output_index": index}
            yield event("response.output_item.added", output_index=index, item=_empty(item))
            if item["type"] == "function_call":
                for piece in slices(item["arguments"]):
                    yield event("response.function_call_arguments.delta", delta=piece, **place)
                yield event("response.function_call_arguments.done", arguments=item["arguments"], **place)
            else:
                part = item["content"][0]
                name = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
                yield event("response.content_part.added", content_index=0, part={**part, "text": ""}, **place)
                for piece in slices(part["text"]):
                    yield event(f"{name}.delta", content_index=0, delta=piece, **place)
                yield event(f"{name}.done", content_index=0, text=part["text"], **place)
                yield event("response.content_part.done", content_index=0, part=part, **place)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event("response.completed", response={**opened, "status": "completed", "output": items, "usage": _usage(usage)})

    def _items(self, reply: Reply, body: Json) -> list[Json]:
        items: list[Json] = []
        if reply.reasoning:
            content = [{"type": "reasoning_text", "text": reply.reasoning}]
            items.append({"id": fresh("rs_"), "type": "reasoning", "summary": [], "content": content, "status": "completed"})
        if reply.text:
            content = [{"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}]
            items.append({"id": fresh("msg_"), "type": "message", "role": "assistant", "status": "completed", "content": content})
        return items + [_call(call, body) for call in reply.calls]

    def _response(self, body: Json, status: str, items: list[Json], usage: Usage | None) -> Json:
        head = {"id": fresh("resp_"), "object": "response", "created_at": int(time.time()), "model": body.get("model", "")}
        told = {"tools": body.get("tools") or [], "tool_choice": "auto", "parallel_tool_calls": True, "error": None, "metadata": {}}
        return {**head, **told, "status": status, "output": items, "usage": _usage(usage) if usage else None}


def _call(call: ToolCall, body: Json) -> Json:
    """A tool of a namespace is named `<namespace>__<tool>` in scripts and by both names on the wire."""
    item: Json = {"id": fresh("fc_"), "type": "function_call", "call_id": fresh("call_"), "name": call.name, "arguments": call.arguments}
    for tool in body.get("tools") or ():
        space = f"{tool.get('name')}__"
        if tool.get("type") == "namespace" and call.name.startswith(space):
            item |= {"name": call.name.removeprefix(space), "namespace": tool["name"]}
    return {**item, "status": "completed"}


def _empty(item: Json) -> Json:
    return {**item, "status": "in_progress", **({"arguments": ""} if item["type"] == "function_call" else {"content": []})}


def _usage(usage: Usage) -> Json:
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {"input_tokens": usage.prompt, "output_tokens": usage.reply, "total_tokens": usage.prompt + usage.reply, **details}
