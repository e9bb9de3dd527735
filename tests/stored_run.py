"""Run directories as a run leaves them, made by hand: config, call log, records, archived workspaces. No Ray, no engine."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from forge_ray.config import Config
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir, write_json
from forge_ray.sandboxes.archive import archive_tree
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.call_log import CallLogWriter


def stored_run(root: Path, config: Config | None = None) -> RunDir:
    """An empty run directory; with its config, if given."""
    run = RunDir(root).create()
    write_json(run.state, {"incarnation": 1, "secret": "ab" * 32}, mode=0o600)
    if config is not None:
        run.config.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return run


def store(run: RunDir, rollouts: Sequence[tuple[RolloutRecord, Sequence[Call]]]) -> None:
    """Write records and the events of their calls, each prompt whole."""

    async def write() -> None:
        number = len(list(run.calls.glob("*.jsonl")))
        writer = CallLogWriter(run.calls / f"r{number}.jsonl")
        events = [event for _, calls in rollouts for call in calls for event in _events(call)]
        events += [{"event": "session", "session": record.id, "status": "closed", "limit": None, "t": 900.0} for record, _ in rollouts]
        await asyncio.gather(*(writer.put(event) for event in events))
        writer.close()

    asyncio.run(write())
    for record, _ in rollouts:
        file = run.rollouts / record.id / "result.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(record.model_dump_json())


def archived(run: RunDir, files: Mapping[str, str]) -> str:
    """Archive a workspace of these files; its digest."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return archive_tree(Path(directory), run.rollouts / "archive")


def _events(call: Call) -> list[dict[str, Any]]:
    opened = {
        "event": "open", "call": call.id, "session": call.session, "purpose": call.purpose, "replica": "r", "t": call.opened,
        "dialect": call.dialect, "path": call.path, "streamed": call.streamed, "kind": call.kind, "conversation": call.conversation,
        "request_sha256": "", "parent": None, "shared": 0, "new": call.prompt_ids, "sampling": call.sampling,
        "masked_by_grammar": call.masked_by_grammar, "max_tokens": call.max_tokens, "version": "0.3", "splice": "new",
    }  # fmt: skip
    ended = {
        "event": call.status, "call": call.id, "t": call.ended, "ids": call.ids, "logprobs": call.logprobs,
        "spans": [list(span) for span in call.spans or ()], "finish_reason": "stop", "stop_reason": None, "version": "0.3", "error": None,
    }  # fmt: skip
    delivered = {
        "event": "undelivered" if call.delivered is False else "delivered", "call": call.id, "t": call.ended,
        "response_sha256": "", "bytes": 1, "status": 200, "usage": None, "reply": "answer", "issued": [],
        "first_byte_s": 0.1, "last_byte_s": 0.2,
    }  # fmt: skip
    return [opened, ended, delivered]
