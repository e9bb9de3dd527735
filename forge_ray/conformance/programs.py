"""The programs of the suite as data: the names that their tools go by, and how each is known to behave.

A case is written in actions (run a command, start a sub-agent, finish); a `Program` turns an action into the tool call that its model would
make. What differs from program to program in the outcome of a case stands here too, so that the cases themselves know no program.
The behaviour was measured with the pinned versions of `forge_ray.harnesses`; a new version of a program may need a new row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_ray.conformance.door import FaultKind
from forge_ray.conformance.reply import Reply, ToolCall
from forge_ray.conformance.spelling import Spelling, spell


@dataclass(frozen=True)
class Tool:
    """A tool of a program, with the one argument that matters."""

    name: str
    argument: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, as a model would give them."""
    first: bool = True
    """Whether `argument` comes before the others in the tool's schema."""

    shape: str = ""
    """The argument is an object with the value under this key; "": it is the value itself."""

    def call(self, value: Any, spelling: Spelling = "python") -> ToolCall:
        """A call of it, its arguments spelt in this way."""
        own = {self.argument: {self.shape: value} if self.shape else value}
        return ToolCall(self.name, spell({**own, **self.extra} if self.first else {**self.extra, **own}, spelling))


@dataclass(frozen=True)
class Spawn:
    """How a program starts a sub-agent and gets its report."""

    tool: Tool
    then: Literal["report", "notice", "wait"]
    """report: the call blocks and returns it. notice: the call returns at once, the report comes as a user message of its own after the
    agent's next answer. wait: the call returns an id, and another tool waits for it."""
    wait: Tool | None = None
    find: str = ""
    """Regular expression for the id in what the call returned."""
    report: Tool | None = None
    """The tool by which the sub-agent hands in its report; None: its last answer is the report."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the adapter that turn sub-agents on."""


@dataclass(frozen=True)
class Compaction:
    """How a program shortens a history that has become too long."""

    trigger: Literal["overflow", "usage"]
    """overflow: the proxy refuses a prompt as too long. usage: the program's count, made from a reply's usage, is above its own limit."""
    words: Mapping[str, str]
    """Conditions of a script's rule (`if`, `last`) by which the request for a summary is known."""
    outputs: int = 3
    """Commands with 32,000 characters of output that make the history long, in one reply."""
    same_conversation: bool = False
    """Whether the program names the shortened history by the id of the old one."""
    fork: str | None = None
    """Words in the reason why the second call after it does not continue the first; None: it does."""
    window: int = 200_000
    """Context window that the program is told of, tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the adapter for this case."""


@dataclass(frozen=True)
class Program:
    """One program; `name` is its adapter's."""

    name: str
    dialect: str
    shell: Tool
    spawn: Spawn | None = None
    compaction: Compaction | None = None
    submit: str | None = None
    """A command by which the model hands the work in; None: an answer without a tool call ends the run."""
    gives_up: frozenset[FaultKind] = frozenset()
    """Faults after which it ends without a further try."""
    fork: str | None = None
    """Words in the reason why no prompt of it continues the one before; None: they do."""
    side: tuple[Mapping[str, str], ...] = ()
    """Rules (conditions and a name) of requests that are no turn of the agent: titles."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the adapter for every case."""

    def end(self, text: str) -> Reply:
        """The model's last turn."""
        return Reply(text, (self.shell.call(self.submit),) if self.submit else ())


_ALL = [
    Program(
        "codex",
        "responses",
        Tool("exec_command", "cmd", {"yield_time_ms": 10000}),
        spawn=Spawn(
            Tool("multi_agent_v1__spawn_agent", "message"),
            "wait",
            wait=Tool("multi_agent_v1__wait_agent", "targets"),
            find=r'"agent_id\W+([0-9a-f-]{36})',
        ),
        compaction=Compaction(
            "usage",
            {"last": "CONTEXT CHECKPOINT COMPACTION"},
            same_conversation=True,
            options={"config": {"model_auto_compact_token_limit": 20_000}},
        ),
        gives_up=frozenset({"429"}),
    ),
    Program(
        "claude_code",
        "messages",
        Tool("Bash", "command", {"description": "Do the next step"}),
        spawn=Spawn(Tool("Agent", "prompt", {"description": "Write a file", "subagent_type": "general-purpose"}, first=False), "notice"),
        compaction=Compaction("overflow", {"last": "an <analysis> block followed by a <summary> block"}),
    ),
    Program("zeroclaw", "chat", Tool("shell", "command", {"approved": True}), spawn=Spawn(Tool("spawn_subagent", "prompt"), "report")),
    Program("openclaw", "chat", Tool("exec", "command", {"timeoutSeconds": 60}), fork="was transient"),
    Program(
        "qwen_code",
        "chat",
        Tool("run_shell_command", "command", {"description": "Do the next step", "is_background": False}),
        spawn=Spawn(Tool("agent", "prompt", {"description": "Write a file", "subagent_type": "general-purpose"}, first=False), "notice"),
        compaction=Compaction("overflow", {"if": "state_snapshot"}, fork="user item 1 changed"),
    ),
    Program(
        "gemini_cli",
        "gemini",
        Tool("run_shell_command", "command", {"description": "Do the next step"}),
        spawn=Spawn(
            Tool("invoke_agent", "prompt", {"agent_name": "generalist"}, first=False),
            "report",
            report=Tool("complete_task", "result", shape="response"),
        ),
        gives_up=frozenset({"cut"}),
    ),
    Program(
        "opencode",
        "chat",
        Tool("bash", "command", {"description": "Do the next step"}),
        spawn=Spawn(Tool("task", "prompt", {"description": "Write a file", "subagent_type": "general"}, first=False), "report"),
        compaction=Compaction("overflow", {"if": "Here is the conversation so far"}, same_conversation=True),
        side=({"name": "title", "if": "You are a title generator"},),
    ),
    Program("mini_swe_agent", "chat", Tool("bash", "command"), submit="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    Program(
        "kimi_code",
        "chat",
        Tool("Bash", "command", {"timeout": 60}),
        spawn=Spawn(Tool("Agent", "prompt", {"description": "Write a file"}, first=False), "report"),
        # It keeps 50,000 tokens of the window free. When a prompt is refused, it takes its window for smaller than its tools.
        compaction=Compaction("usage", {"last": "Create a handoff summary for the"}, same_conversation=True, window=95_000),
    ),
]
PROGRAMS = {program.name: program for program in _ALL}
