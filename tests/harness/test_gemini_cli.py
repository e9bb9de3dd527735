"""The real Gemini CLI over the Gemini dialect, vLLM's app and the scripted engine: what it writes, and what comes back to the proxy."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from forge_ray.harnesses.harness import Launch, get
from tests.harness.installed import require
from tests.integration import edge_rig
from tests.tiny_model import TEMPLATE

pytestmark = pytest.mark.timeout(900)

WINDOW = 131072
THINKING = TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' if message.reasoning_content else '' }}{{ message.content or '' }}",
)
"""A template that keeps the reasoning of earlier turns."""


def call(name: str, **arguments: Any) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TURNS = [
    "<think>\nfirst a look, ☕\n</think>\n\n  I look.  "
    + call("run_shell_command", description="look", command="printf 'a\\n\\tb é' > seen.txt"),
    "<think>\nnow two at once\n</think>\n\n"
    + call("write_file", content='{"q": "\\u00e9\\/"}\n', file_path="WORKSPACE/out.json")
    + call("run_shell_command", command="cat seen.txt"),
    "<think>\nonce more\n</think>\n\nAnd again." + call("read_file", file_path="WORKSPACE/out.json"),
    "<think>\nenough\n</think>\n\nIt holds é.",
]


@asynccontextmanager
async def served(edge: Any) -> AsyncIterator[str]:
    """The edge on a port of this machine."""
    server = uvicorn.Server(uvicorn.Config(edge, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def run(url: str, base: str, tmp_path: Path, instruction: str) -> tuple[int | None, str]:
    """Exit code and output of the program, in `tmp_path/workspace`."""
    workspace, home = tmp_path / "workspace", tmp_path / "home"
    session = base.rpartition("/s/")[2]
    launch = Launch(instruction, str(workspace), str(home), f"{url}/s/{session}", session, "policy", WINDOW)
    command = get("gemini_cli").configure(launch)
    for directory, files in ((home, command.home_files), (workspace, command.workspace_files)):
        directory.mkdir(exist_ok=True)
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **command.env}
    program = await asyncio.create_subprocess_exec(
        *command.argv,
        cwd=workspace,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(program.communicate(), 600)
    return program.returncode, output.decode(errors="replace")


async def test_four_turns_with_thoughts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("gemini_cli")
    monkeypatch.setattr(edge_rig, "WINDOW", WINDOW)
    turns = [text.replace("WORKSPACE", str(tmp_path / "workspace")) for text in TURNS]
    rules = [{"if": "four turns", "turn": turn, "say": text} for turn, text in enumerate(turns)]
    async with (
        edge_rig.edge_rig(tmp_path, rules, template=THINKING, server={"reasoning_parser": "qwen3"}) as rig,
        served(rig.edge) as url,
    ):
        code, output = await run(url, rig.base("cli"), tmp_path, "Do the four turns.")
        assert await rig.edge.drained("cli", 120)
        calls = rig.calls("cli")
        prompts = [rig.prompt(call) for call in calls]
    assert code == 0, output[-3000:]
    assert (tmp_path / "workspace" / "out.json").read_text() == '{"q": "\\u00e9\\/"}\n'
    assert (tmp_path / "workspace" / "seen.txt").read_text() == "a\n\tb é"
    said = [[*rig.tokenizer.encode(text, add_special_tokens=False), rig.tokenizer.eos_token_id] for text in turns]
    assert [call.ids for call in calls] == said
    assert [(call.dialect, call.kind, call.reply, call.trainable) for call in calls] == [
        ("gemini", "agent", reply, True) for reply in ("tool_calls", "tool_calls", "tool_calls", "answer")
    ]
    assert len({call.conversation for call in calls}) == 1
    # It drops thoughts, but brings them back in the signatures: each prompt goes on from the tokens that were sampled.
    assert [call.splice for call in calls if call.splice not in ("exact", "spliced")] == ["new"], [call.reason for call in calls]
    for earlier, later in pairwise(calls):
        assert later.prompt_ids[: len(earlier.prompt_ids) + len(earlier.ids)] == [*earlier.prompt_ids, *earlier.ids]
    assert "\n\tb é" in prompts[2] and prompts[3].count("<tool_response>") == 4
