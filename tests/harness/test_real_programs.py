"""Real harness programs, unmodified, through the real proxy: each writes a file by the script's words, and the recording is the script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from forge_ray.outcome import Outcome
from forge_ray.serve_proxy import scripted_engine
from tests.bench import ANSWER_IS_42, Workbench, call, workbench, write_task
from tests.harness.installed import require

pytestmark = pytest.mark.timeout(900)

PI = str(Path(__file__).resolve().parents[2] / "examples" / "pi" / "harness.py") + ":Pi"
"""The documentation's example of a harness in one file."""


@dataclass(frozen=True)
class Program:
    """What differs from program to program."""

    tool: str
    """Its tool that runs a shell command."""
    dialect: str = "chat"
    argument: str = "command"
    more: dict[str, str] = field(default_factory=dict)
    """Further arguments, in front: not the order of its schema."""
    end: str = ""
    """A last tool call; by default a text ends the run."""
    side: int = 0
    """Calls that are no turn of the agent (titles)."""

    def turns(self) -> list[str]:
        """What the policy says."""
        write, look = ({**self.more, self.argument: command} for command in ("echo 42 > answer.txt", "cat answer.txt"))
        return ["I write the file." + call(self.tool, **write), "Now I look." + call(self.tool, **look), "It holds 42: café ☕." + self.end]


PROGRAMS = {
    "react": Program("bash"),
    "codex": Program("exec_command", "responses", "cmd"),
    "claude_code": Program("Bash", "messages", more={"description": "do it"}),
    "zeroclaw": Program("shell"),
    "openclaw": Program("exec"),
    "qwen_code": Program("run_shell_command"),
    "gemini_cli": Program("run_shell_command", "gemini"),
    "opencode": Program("bash", more={"description": "do it"}, side=1),
    "mini_swe_agent": Program("bash", end=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
    "kimi_code": Program("Bash"),
    PI: Program("bash"),
}
DIALECTS = str(Path(__file__).with_name("dialects.py"))
"""Adapters with another dialect as their default."""
PROGRAMS |= {
    f"{DIALECTS}:{own}": replace(PROGRAMS[name], dialect=dialect)
    for own, (name, dialect) in {
        "OpenCodeResponses": ("opencode", "responses"),
        "OpenCodeMessages": ("opencode", "messages"),
        "ZeroClawResponses": ("zeroclaw", "responses"),
        "ZeroClawMessages": ("zeroclaw", "messages"),
    }.items()
}
TITLE = {"if": "You are a title generator", "say": "The answer"}


def short(name: str) -> str:
    """A name without the path of its file."""
    return name.rpartition(":")[2]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    script: list[dict[str, Any]] = [TITLE]
    for name, program in PROGRAMS.items():
        script += [{"if": f"job {short(name)}:", "turn": turn, "say": text} for turn, text in enumerate(program.turns())]
    harnesses: list[dict[str, Any]] = [{"name": name} for name in PROGRAMS]
    with workbench(tmp_path_factory.mktemp("programs"), "programs", harnesses, script, rollouts={"deadline_s": 300}) as bench:
        yield bench


@pytest.mark.parametrize("name", list(PROGRAMS), ids=short)
def test_a_rollout(bench: Workbench, name: str, tmp_path: Path) -> None:
    require(name)
    from transformers import AutoTokenizer

    program = PROGRAMS[name]
    instruction = f"Your job {short(name)}: write 42 to answer.txt and look whether it is there.\n"
    task = write_task(tmp_path, f"answer-{short(name).lower()}", instruction, ANSWER_IS_42)
    record = bench.rollout(name, task)
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), f"{record.detail}\n{bench.log(record)[-3000:]}"
    assert record.exit_code == 0 and record.calls == 3 + program.side

    tokenizer = AutoTokenizer.from_pretrained(bench.config.policy.model.path)
    every = bench.calls(record.id)
    assert {c.dialect for c in every} == {program.dialect} and len(every) == 3 + program.side
    calls = [c for c in every if c.kind == "agent"]
    assert [c.kind for c in every if c.kind != "agent"] == ["aux"] * program.side
    said = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in program.turns()]
    assert [c.ids for c in calls] == said
    for recorded in calls:
        assert recorded.status == "finished" and recorded.delivered and recorded.trainable
        assert recorded.logprobs == pytest.approx([scripted_engine.logprob(i, token) for i, token in enumerate(recorded.ids)], abs=1e-6)
    assert [c.reply for c in calls] == ["tool_calls", "tool_calls", "tool_calls" if program.end else "answer"]
    assert record.sampled_tokens == sum(len(c.ids) for c in every)
    assert "42" in tokenizer.decode(calls[2].prompt_ids).rpartition("cat answer.txt")[2]  # what the program read back from the file
    if name != "openclaw":  # each of its prompts ends with a message that the next leaves out
        assert len({c.conversation for c in calls}) == 1
