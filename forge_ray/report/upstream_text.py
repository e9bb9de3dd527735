"""A call that another model answered, as text, for `forge-ray replay`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from forge_ray.report.trajectory import visible
from forge_ray.trajectories.upstream import ITEMS, UpstreamCall

SHOWN = 600
"""Characters of an item of the request that are shown, from its end, unless all are asked for."""


def lines(call: UpstreamCall, *, full: bool = False) -> Iterator[str]:
    """What was asked, item by item (without `full` only what follows the last reply), and what was answered."""
    yield ""
    yield f"── {visible(call.model)} (another model, upstream {visible(call.upstream)}) {call.id}"
    scored = f" · {len(call.logprobs['tokens'])} tokens with logprobs" if call.logprobs else ""
    arrived = {True: "delivered", False: "undelivered", None: "nobody knows whether it was delivered"}[call.delivered]
    yield (
        f"   {call.dialect}{' streamed' if call.streamed else ''} · {call.kind} · {call.status}, status {call.http_status}, {arrived} · "
        f"{call.ended - call.opened:.2f} s{scored}{f' · {visible(call.error)}' if call.error else ''}"
    )
    yield "   trained: no, it is text of another model"
    name = next((name for name in ITEMS if name in call.request), "prompt")
    items = call.request.get(name)
    items = items if isinstance(items, list) else [items]
    first = 0 if full else max((at + 1 for at, item in enumerate(items) if _role(item) == "assistant"), default=0)
    if first:
        yield f"   {first} earlier items (--full)"
    for item in items[first:]:
        yield from _block(_role(item), _said(item), full)
    for title, text in (("thought", call.reply.get("reasoning")), ("reply", call.reply.get("text"))):
        if text:
            yield from _block(title, text, full)
    for made in call.reply.get("tool_calls") or ():
        yield from _block("calls", f"{made['name']}({made['arguments']})", full)


def _role(item: Any) -> str:
    return str(item.get("role") or item.get("type") or "?") if isinstance(item, dict) else "user"


def _said(item: Any) -> str:
    content = item.get("content") if isinstance(item, dict) else item
    if isinstance(content, str) and content:
        return content
    return json.dumps(item, ensure_ascii=False)


def _block(title: str, text: str, full: bool) -> Iterator[str]:
    text = visible(text)
    if not full and len(text) > SHOWN:
        text = f"[… {len(text) - SHOWN} characters]{text[-SHOWN:]}"
    for number, line in enumerate(text.split("\n")):
        yield f"   {title if number == 0 else '':>9} │ {line}"
