"""A demonstration made without the proxy is, token for token, what the proxy records of the same episode.

The real react program runs the teacher's commands in its own process, against vLLM's app over a policy that says what the teacher
said; the chain built from the recording must equal the demonstration that was rendered in bulk.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from forge_ray.harnesses import react_program
from forge_ray.trajectories import credit
from tests.built import chains
from tests.integration.scripted import scripted
from tests.quickstart import module

EPISODES, OUTPUT_CHARS = 12, 60


async def run_react(url: str, key: str, instruction: str, files: dict[str, str], folder: Path) -> None:
    workspace = folder / "workspace"
    workspace.mkdir(parents=True)
    for name, text in files.items():
        (workspace / name).write_text(text + "\n")
    (folder / "instruction.md").write_text(instruction)
    command = [
        *(sys.executable, "-I", "-S", react_program.__file__, str(folder / "instruction.md")),
        *("--base-url", f"{url}/v1", "--model", "policy", "--output-chars", str(OUTPUT_CHARS), "--retry-seconds", "0"),
    ]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(workspace), "OPENAI_API_KEY": key}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=workspace,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode(errors="replace")


@pytest.mark.timeout(300)
async def test_the_same_episode_recorded_through_the_proxy_has_the_same_tokens(tmp_path: Path) -> None:
    families, policy, teacher = module("families"), module("policy"), module("teacher")
    policy.build(tmp_path / "model", 0)
    tokenizer = policy.tokenizer()
    names = list(families.FAMILIES)
    episodes: list[tuple[Any, list[dict[str, Any]]]] = []
    for index in range(EPISODES):
        draw = random.Random(index)
        task = families.problem(names[index % len(names)], draw, "train")
        episodes.append((task, teacher.episode(task, teacher.strategy(task, draw, 0.5), OUTPUT_CHARS)))
    demonstrations = list(teacher.render([conversation for _, conversation in episodes], tokenizer))
    rules = []
    for task, conversation in episodes:
        for turn, message in enumerate(m for m in conversation if m["role"] == "assistant"):
            calls = message.get("tool_calls")
            arguments = json.loads(calls[0]["function"]["arguments"]) if calls else None
            say = f'<tool_call>{{"name": "bash", "arguments": {json.dumps(arguments)}}}</tool_call>' if calls else message["content"]
            rules.append({"if": task.instruction, "turn": turn, "say": say})
    listener = socket.create_server(("127.0.0.1", 0))
    async with scripted(tmp_path, rules, model=tmp_path / "model", engine={"max_model_len": 256, "dtype": "float32"}) as proxy:
        server = uvicorn.Server(uvicorn.Config(proxy.app, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            for number, (task, _) in enumerate(episodes):
                path = proxy.url(f"e{number}")
                url = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
                await run_react(url, path.rpartition("/")[2], task.instruction, task.files, tmp_path / f"e{number}")
                await proxy.edge.drained(f"e{number}", timeout_s=30)
        finally:
            server.should_exit = True
            await serving
        for number, demonstration in enumerate(demonstrations):
            calls = credit.by_completion(proxy.calls(f"e{number}"))
            (sample,) = chains(calls)
            assert sample.ids == demonstration.ids, tokenizer.decode(sample.ids)
            assert sample.mask == demonstration.mask
