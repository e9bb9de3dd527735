"""The README's examples do what they say."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

from forge_ray.cli.main import arguments
from forge_ray.config import load
from forge_ray.harnesses import harness
from forge_ray.tasks.task import load_task

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str = "") -> list[str]:
    """The fenced blocks of one language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


def test_the_harness_example(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    launch = harness.Launch("Do it", "/workspace", "/home/agent", "http://127.0.0.1:1/s/token", "token", "policy", 2048)
    command = harness.get(f"{tmp_path}/mine.py:Mine").configure(launch)
    assert command.argv[-1] == "Do it" and command.env["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/token/v1"


def write_tasks(directory: Path) -> None:
    """The README's task directory."""
    (block,) = [block for block in blocks() if block.startswith("my-tasks/")]
    files: dict[str, str] = {}
    name = ""
    for line in block.splitlines():
        start, text = line[:43].strip(), line[43:]
        name = start or name
        files[name] = files.get(name, "") + text + "\n"
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_task_example(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    task = load_task(tmp_path / "my-tasks" / "greet")
    assert task.instruction.strip() == "Write hello to out.txt" and task.notes == ()
    assert task.unsupported("process", "none") == []


def test_the_whole_config_with_the_harness_and_the_task(tmp_path: Path) -> None:
    """`forge-ray check --quick` finds nothing missing in a directory made of the README's blocks, a model and the agent."""
    agent = tmp_path / "my-agent" / "bin" / "agent"
    agent.parent.mkdir(parents=True)
    agent.write_text("#!/bin/sh\n")
    agent.chmod(0o755)
    (tmp_path / "mine.py").write_text(blocks("python")[0].replace("/opt/my-agent", str(tmp_path / "my-agent")))
    write_tasks(tmp_path)
    (tmp_path / "run.yaml").write_text(blocks("yaml")[0])
    config = load(tmp_path / "run.yaml")
    assert config.policy.engine == {"max_model_len": 8192} and config.train.optimizer.lr == 1e-6 and not config.eval.before
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [f"policy.model={small_model(tmp_path / 'model')}", f"runs={tmp_path / 'runs'}", f"proxy.port={port}", "ray.address=local"]
    command = [sys.executable, "-m", "forge_ray.cli.main", "check", "--quick", str(tmp_path / "run.yaml"), *words]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^note +tasks.heldout +none: nothing is evaluated", done.stdout, re.MULTILINE)


def small_model(directory: Path) -> Path:
    """What `check` looks at of a model directory."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return directory


def test_the_commands_exist() -> None:
    lines = [line.partition("#")[0].split() for block in blocks() for line in block.splitlines() if line.startswith("forge-ray ")]
    assert len(lines) >= 5
    for words in lines:
        arguments(words[1:])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
