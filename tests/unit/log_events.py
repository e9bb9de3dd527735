"""Events of a call log as a test writes them: calls that are opened, ended and delivered, and files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge_ray.trajectories.call_log import CallLogReader


def opened(
    call: str, session: str, new: list[int], *, parent: str | None = None, shared: int = 0, t: float = 1.0, **changes: Any
) -> dict[str, Any]:
    event = {"event": "open", "call": call, "session": session, "purpose": "train", "replica": "r0", "t": t, "dialect": "chat"}
    event |= {"path": "/v1/chat/completions", "streamed": False, "kind": "agent", "conversation": "c", "request_sha256": f"sha-{call}"}
    event |= {"parent": parent, "shared": shared, "new": new, "sampling": {"temperature": 0.7}, "masked_by_grammar": False}
    return event | {"max_tokens": 16, "version": "0.1"} | changes


def ended(call: str, ids: list[int], *, event: str = "finished", t: float = 2.0, **changes: Any) -> dict[str, Any]:
    spans = [["0.1", 0, len(ids)]] if ids else []
    end = {"event": event, "call": call, "t": t, "ids": ids, "logprobs": [-0.5] * len(ids), "spans": spans}
    return end | {"finish_reason": "stop", "stop_reason": None, "version": "0.1", "error": None} | changes


def delivery(call: str, *, event: str = "delivered", reply: str | None = "answer") -> dict[str, Any]:
    return {"event": event, "call": call, "t": 3.0, "response_sha256": "x", "bytes": 9, "status": 200, "usage": None, "reply": reply} | {
        "first_byte_s": 0.1,
        "last_byte_s": 0.2,
    }


def whole(call: str, session: str, new: list[int] | None = None, ids: list[int] | None = None, t: float = 1.0) -> list[dict[str, Any]]:
    """A call that is trainable."""
    return [opened(call, session, new or [1, 2], t=t), ended(call, ids or [3], t=t + 1), delivery(call)]


def write(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def read(directory: Path) -> CallLogReader:
    reader = CallLogReader(directory)
    reader.refresh()
    return reader
