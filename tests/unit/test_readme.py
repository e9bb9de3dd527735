"""The README's examples do what they say, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from forge_ray.cli.main import parser
from forge_ray.config import load
from forge_ray.harnesses import harness
from forge_ray.tasks.task import load_task

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str = "") -> list[str]:
    """The fenced blocks of one language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^"]+)"', re.sub(r"<!--.*?-->", "", README, flags=re.DOTALL))
    assert len(targets) > 4
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_harness_example(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    launch = harness.Launch("Do it", "/workspace", "/home/agent", "http://127.0.0.1:1/s/token", "token", "policy", 2048)
    command = harness.get(f"{tmp_path}/mine.py:Mine").configure(launch)
    assert command.argv[-1] == "Do it" and command.env["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/token/v1"


def test_the_task_example(tmp_path: Path) -> None:
    (block,) = [block for block in blocks() if block.startswith("my-tasks/")]
    files: dict[str, str] = {}
    name = ""
    for line in block.splitlines():
        start, text = line[:43].strip(), line[43:]
        name = start or name
        files[name] = files.get(name, "") + text + "\n"
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    task = load_task(tmp_path / "my-tasks" / "greet")
    assert task.instruction.strip() == "Write hello to out.txt" and task.notes == ()
    assert task.unsupported("process", "none") == []


def test_the_model_example(tmp_path: Path) -> None:
    tree = yaml.safe_load(blocks("yaml")[0])
    tree |= {"name": "mine", "harnesses": [{"name": "react"}], "tasks": {"train": "t"}, "eval": {"before": False, "after": False}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load(tmp_path / "run.yaml")
    assert config.policy.engine == {"max_model_len": 8192} and config.train.optimizer.lr == 1e-6


def test_the_commands_exist() -> None:
    lines = [line.partition("#")[0].split() for block in blocks() for line in block.splitlines() if line.startswith("forge-ray ")]
    assert len(lines) >= 5
    for words in lines:
        parser().parse_args([word for word in words[1:] if "=" not in word])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
