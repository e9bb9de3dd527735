"""Requests in the form in which real harnesses send them: every kind of field, tool and item, shortened texts."""

from __future__ import annotations

import json
from typing import Any


def _function(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}, "additionalProperties": False}
    return {"type": "function", "name": name, "description": f"{name} of the harness", "strict": False, "parameters": schema}


CODEX_HEADERS = {
    "user-agent": "codex_exec/0.171.0 (Debian 12; x86_64) unknown",
    "originator": "codex_exec",
    "session-id": "019c0000-aaaa",
    "thread-id": "019c0000-aaaa",
    "x-client-request-id": "019c0000-aaaa",
    "x-codex-window-id": "019c0000-aaaa:0",
    "x-codex-turn-metadata": json.dumps({"request_kind": "turn", "session_id": "019c0000-aaaa", "thread_id": "019c0000-aaaa"}),
    "accept": "text/event-stream",
}


def _item(number: int, role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{number}", "role": role, "content": [{"type": kind, "text": text}]}


def codex(*later: dict[str, Any], model: str = "policy") -> dict[str, Any]:
    """A first request of Codex; `later` are the input items that follow in later turns."""
    spawn = [_function("spawn_agent", message="string"), _function("wait_agent", id="string")]
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: begin_patch hunk+ end_patch\nbegin_patch: "*** Begin Patch" LF'}
    return {
        "model": model,
        "input": [
            _item(1, "developer", "You are a coding agent running in a terminal. Sandbox: danger-full-access. Approvals: never."),
            _item(2, "developer", "Collaboration mode: default."),
            _item(3, "user", "<environment_context>\n  <cwd>/workspace</cwd>\n  <shell>bash</shell>\n</environment_context>"),
            _item(4, "user", "Write the word codex into out.txt"),
            *later,
        ],
        "tools": [
            _function("exec_command", cmd="string", workdir="string"),
            _function("write_stdin", session_id="number", chars="string"),
            {"type": "namespace", "name": "multi_agent_v1", "description": "Work with other agents", "tools": spawn},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch", "description": "Edit files with a patch", "format": grammar},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019c0000-aaaa",
        "client_metadata": {"x-codex-installation-id": "c0ffee"},
    }


CLAUDE_HEADERS = {
    "user-agent": "claude-cli/2.1.332 (external, sdk-cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "5f0d",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24",
    "x-stainless-retry-count": "0",
    "authorization": "Bearer dummy",
}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def claude_code(*later: dict[str, Any], model: str = "policy", nonce: str = "36ee5", **changes: Any) -> dict[str, Any]:
    """A first request of Claude Code; `later` are the messages that follow in later turns."""
    text = {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>\n"}
    bash = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}, "required": ["command"]}
    agent = {"type": "object", "properties": {"description": {"type": "string"}, "prompt": {"type": "string"}}, "required": ["prompt"]}
    return {
        "model": model,
        "messages": [
            {"role": "user", "content": [text, {"type": "text", "text": "Write the word claude into out.txt"}]},
            {"role": "system", "content": [{"type": "text", "text": "Available agent types: general-purpose", **EPHEMERAL}]},
            *later,
        ],
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.332.abc; cch={nonce};"},
            {"type": "text", "text": "You are Claude Code, a coding agent.", **EPHEMERAL},
            {"type": "text", "text": "# Environment\nYou run in /workspace.", **EPHEMERAL},
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Run a command",
                "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", **bash},
            },
            {"name": "Agent", "description": "Start a sub-agent", "input_schema": agent},
            {
                "name": "WebFetch",
                "description": "Fetch a page",
                "input_schema": {"type": "object", "properties": {}},
                "defer_loading": True,
            },
        ],
        "metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "5f0d"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **changes,
    }
