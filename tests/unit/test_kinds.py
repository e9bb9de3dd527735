"""Kinds of calls, by the headers that the harnesses really send."""

from __future__ import annotations

from typing import Any

import pytest

from forge_ray.serve_proxy.kinds import classify

CODEX = {"user-agent": "codex_exec/0.171.0", "session-id": "s", "thread-id": "t1", "x-codex-turn-metadata": '{"request_kind":"turn"}'}
CLAUDE = {"user-agent": "claude-cli/2.1.332", "x-claude-code-session-id": "s"}
OPENCODE = {"user-agent": "opencode/1.18.33", "x-session-id": "s"}
TOOLS = {"tools": [{"name": "bash"}]}
HISTORY = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "sum up"}]}


@pytest.mark.parametrize(
    ("headers", "body", "side", "expected"),
    [
        ({}, {}, False, ("agent", None)),
        ({}, TOOLS, True, ("aux", None)),
        (CODEX, TOOLS, False, ("agent", "t1")),
        (CODEX | {"x-openai-subagent": "collab_spawn", "thread-id": "t2"}, TOOLS, False, ("subagent", "t2")),
        (CODEX | {"x-codex-turn-metadata": '{"request_kind":"compaction"}'}, {}, False, ("compaction", "t1")),
        (CODEX | {"x-codex-turn-metadata": "not json"}, TOOLS, False, ("agent", "t1")),
        (CODEX | {"x-codex-turn-metadata": "[1]"}, TOOLS, False, ("agent", "t1")),
        (CLAUDE, TOOLS, False, ("agent", None)),
        (CLAUDE | {"x-claude-code-agent-id": "a7"}, TOOLS, False, ("subagent", "a7")),
        (CLAUDE, TOOLS, True, ("aux", None)),
        (OPENCODE, TOOLS, False, ("agent", "s")),
        (OPENCODE | {"x-session-id": "c", "x-parent-session-id": "s"}, TOOLS, False, ("subagent", "c")),
        (OPENCODE, {"messages": [{"role": "user", "content": "title?"}]}, False, ("aux", None)),
        (OPENCODE, HISTORY, False, ("compaction", "s")),
        ({"user-agent": "QwenCode/0.24.4"}, HISTORY, False, ("compaction", None)),
        ({"user-agent": "python-httpx"}, HISTORY, False, ("agent", None)),
    ],
)
def test_kind_and_conversation(headers: dict[str, str], body: dict[str, Any], side: bool, expected: tuple[str, str | None]) -> None:
    assert classify(headers, body, side_model=side) == expected
