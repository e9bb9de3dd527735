"""Whether a stream keeps to its dialect: the order of events, the ids in them, and that the last event tells what the others did.

Each function takes the text of a whole stream and gives what it said as a whole body, so that it can be compared with an unstreamed reply.
A violation is an AssertionError that names the event.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Json = dict[str, Any]


def events(text: str) -> list[tuple[str | None, str]]:
    """`(event, data)` of each event; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            assert set(fields) <= {"event", "data"}, block
            found.append((fields.get("event"), fields["data"]))
    return found


def responses(text: str) -> Json:
    """The body of `response.completed`."""
    stream = []
    for name, data in events(text):
        event = json.loads(data)
        assert name == event["type"], event
        stream.append(event)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    kinds = [event["type"] for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed", kinds
    final = stream[-1]["response"]
    for event in (stream[0], stream[1]):
        assert event["response"]["id"] == final["id"] and event["response"]["object"] == "response"
    assert final["object"] == "response" and final["model"] and final["status"] in ("completed", "incomplete")
    items: list[Json] = []
    current: Json | None = None
    for event in stream[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items), event
        if kind == "output_item.added":
            assert current is None, "an item begins inside another"
            current = {"item": event["item"], "kinds": [], "text": "", "done": None}
            continue
        assert current is not None, event
        if kind == "output_item.done":
            _item(current, event["item"])
            items.append(event["item"])
            current = None
            continue
        assert event["item_id"] == current["item"]["id"], event
        current["kinds"].append(kind)
        if kind.endswith(".delta"):
            current["text"] += event["delta"]
        elif kind.endswith(".done") and kind != "content_part.done":
            current["done"] = event[
                {"output_text.done": "text", "reasoning_text.done": "text", "custom_tool_call_input.done": "input"}.get(kind, "arguments")
            ]
    assert current is None, "the last item has no end"
    assert final["output"] == items, "the last event tells of other items"
    return final


_SHAPES = {
    "message": ("output_text", "content_part.added", "content_part.done"),
    "reasoning": ("reasoning_text", "content_part.added", "content_part.done"),
    "function_call": ("function_call_arguments",),
    "custom_tool_call": ("custom_tool_call_input",),
}


def _item(seen: Json, done: Json) -> None:
    """An item's own events, from `added` to `done`."""
    first, kinds = seen["item"], seen["kinds"]
    shape = _SHAPES[done["type"]]
    assert (first["type"], first["id"]) == (done["type"], done["id"]) and first.get("call_id") == done.get("call_id")
    assert first.get("name") == done.get("name")
    expected = [*shape[1:2], *[f"{shape[0]}.delta"] * kinds.count(f"{shape[0]}.delta"), f"{shape[0]}.done", *shape[2:]]
    assert kinds == expected, kinds
    whole = {"message": lambda: done["content"][0]["text"], "reasoning": lambda: done["content"][0]["text"]}.get(
        done["type"], lambda: done["input" if done["type"] == "custom_tool_call" else "arguments"]
    )()
    assert seen["text"] == seen["done"] == whole


def messages(text: str) -> Json:
    """The message that the stream builds up."""
    stream = []
    for name, data in events(text):
        event = json.loads(data)
        assert name == event["type"], event
        if name != "ping":
            stream.append(event)
    assert stream[0]["type"] == "message_start" and [e["type"] for e in stream[-2:]] == ["message_delta", "message_stop"], stream
    message = stream[0]["message"]
    assert message["type"] == "message" and message["role"] == "assistant" and message["content"] == [] and message["id"]
    open_block: Json | None = None
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"]), event
            open_block = dict(event["content_block"], _json="")
            assert open_block["type"] != "tool_use" or (open_block["id"] and open_block["name"] and open_block["input"] == {})
        elif event["type"] == "content_block_stop":
            assert open_block is not None and event["index"] == len(message["content"])
            given = open_block.pop("_json")
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(given or "{}")
            message["content"].append(open_block)
            open_block = None
        else:
            assert event["type"] == "content_block_delta" and open_block is not None and event["index"] == len(message["content"]), event
            delta = event["delta"]
            field = {
                "text_delta": "text",
                "thinking_delta": "thinking",
                "input_json_delta": "partial_json",
                "signature_delta": "signature",
            }[delta["type"]]
            place = "_json" if field == "partial_json" else field
            open_block[place] = (open_block.get(place) or "") + delta[field]
    assert open_block is None, "the last block has no end"
    last = stream[-2]
    return message | last["delta"] | {"usage": message["usage"] | last["usage"], "usage_at_start": message["usage"]}


def chat(text: str) -> Json:
    """The choice that the stream builds up, with `usage` where it was asked for."""
    *chunks, last = [data for _, data in events(text)]
    assert last == "[DONE]"
    stream = [json.loads(data) for data in chunks]
    assert len({(chunk["id"], chunk["object"], chunk["model"]) for chunk in stream}) == 1
    assert stream[0]["object"] == "chat.completion.chunk" and stream[0]["choices"][0]["delta"]["role"] == "assistant"
    message: Json = {"content": "", "reasoning": "", "tool_calls": []}
    calls: dict[int, Json] = defaultdict(lambda: {"arguments": ""})
    finish, usage = [], None
    for chunk in stream:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert not finish or not any(choice["delta"].get(field) for field in ("content", "tool_calls")), chunk
            finish += [choice["finish_reason"]] if choice.get("finish_reason") else []
            for field in ("content", "reasoning"):
                message[field] += choice["delta"].get(field) or ""
            for call in choice["delta"].get("tool_calls") or ():
                known = calls[call["index"]]
                for field in ("id", "name"):
                    value = call.get(field) if field == "id" else call["function"].get(field)
                    assert not value or known.setdefault(field, value) == value, chunk
                known["arguments"] += call["function"].get("arguments") or ""
    assert len(finish) == 1 and sorted(calls) == list(range(len(calls)))
    for call in calls.values():
        assert call["id"] and call["name"] and json.loads(call["arguments"]) is not None
    message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"message": message, "finish_reason": finish[0], "usage": usage}
