"""Real harness programs, unmodified, through the real proxy: each writes a file by the script's words, and the recording is the script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_ray.harnesses.harness import get
from forge_ray.outcome import Outcome
from forge_ray.serve_proxy import scripted_engine
from tests.bench import ANSWER_IS_42, Workbench, call, workbench, write_task

pytestmark = pytest.mark.timeout(900)

TURNS = {
    "react": [
        "I write the file." + call("bash", command="echo 42 > answer.txt"),
        "Now I look." + call("bash", command="cat answer.txt"),
        "It holds 42: café ☕.",
    ],
    "codex": [
        "I write the file." + call("exec_command", cmd="echo 42 > answer.txt"),
        "Now I look." + call("exec_command", cmd="cat answer.txt"),
        "It holds 42: café ☕.",
    ],
    "claude_code": [
        "I write the file." + call("Bash", command="echo 42 > answer.txt", description="write"),
        "Now I look." + call("Bash", description="look", command="cat answer.txt"),  # not in the order of its schema
        "It holds 42: café ☕.",
    ],
}
MARK = {"react": '"name": "bash"', "codex": '"name": "exec_command"', "claude_code": '"name": "Bash"'}
"""What only this harness's prompts contain."""
DIALECT = {"react": "chat", "codex": "responses", "claude_code": "messages"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    script = [{"if": MARK[name], "turn": turn, "say": text} for name, turns in TURNS.items() for turn, text in enumerate(turns)]
    harnesses: list[dict[str, Any]] = [{"name": name} for name in TURNS]
    with workbench(tmp_path_factory.mktemp("programs"), "programs", harnesses, script, rollouts={"deadline_s": 300}) as bench:
        yield bench


def require(name: str) -> None:
    """Skip when the program is not on this machine; fail instead where everything must be there."""
    if missing := get(name).check():
        reason = "; ".join(str(line) for line in missing)
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.mark.parametrize("name", list(TURNS))
def test_a_rollout(bench: Workbench, name: str, tmp_path: Path) -> None:
    require(name)
    from transformers import AutoTokenizer

    task = write_task(tmp_path, f"answer-{name}", "Write 42 to answer.txt and look whether it is there.\n", ANSWER_IS_42)
    record = bench.rollout(name, task)
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), f"{record.detail}\n{bench.log(record)[-3000:]}"
    assert record.calls == 3 and record.exit_code == 0

    tokenizer = AutoTokenizer.from_pretrained(bench.config.policy.model.path)
    calls = bench.calls(record.id)
    assert [c.dialect for c in calls] == [DIALECT[name]] * 3
    assert {c.kind for c in calls} == {"agent"} and len({c.conversation for c in calls}) == 1
    said = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in TURNS[name]]
    assert [c.ids for c in calls] == said
    for recorded in calls:
        assert recorded.status == "finished" and recorded.delivered and recorded.trainable
        assert recorded.logprobs == pytest.approx([scripted_engine.logprob(i, token) for i, token in enumerate(recorded.ids)], abs=1e-6)
    assert [c.reply for c in calls] == ["tool_calls", "tool_calls", "answer"]
    assert record.sampled_tokens == sum(map(len, said))
    assert "42" in tokenizer.decode(calls[2].prompt_ids[-60:])  # what the program read back from the file
