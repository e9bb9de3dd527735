"""Bad input through the real command line: one clear line on stderr, exit code 2, no traceback, and before anything heavy is loaded."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from forge_ray.cli import main
from forge_ray.config import load
from forge_ray.job import state
from tests.task_maker import make_task

COMMANDS = ("check", "train", "rollout", "eval", "serve")
HEAVY = ("ray", "torch", "vllm", "transformers", "pyarrow", "numpy", "matplotlib")


def forge_ray(*words: str, cwd: Path, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run the command; variables that are None are unset."""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": str(cwd)}
    variables |= {name: value for name, value in environment.items() if value is not None}
    variables = {name: value for name, value in variables.items() if environment.get(name, "") is not None}
    command = [sys.executable, "-m", "forge_ray.cli.main", *words]
    return subprocess.run(command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def refused(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert done.returncode == 2, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    (line,) = done.stderr.splitlines()
    assert line.startswith("forge-ray: ") and "Traceback" not in line
    for text in expected:
        assert text in line, line


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run.yaml that nothing is wrong with."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tmp_path / "makers.py").write_text("def other(out, seed):\n    raise SystemExit\n")
    (tmp_path / "broken.py").write_text("def make(: {% if %}\n")
    (tmp_path / "own.py").write_text(
        "from forge_ray.harnesses.harness import Harness\n\nclass Own(Harness):\n    def configure(self, launch): ...\n\n"
        "    def check(self):\n        raise OSError('no luck')\n\nclass Gives(Harness):\n    def configure(self, launch): ...\n"
    )
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    make_task(tmp_path / "tasks" / "one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tree = {
        "name": "bad",
        "runs": "runs",
        "policy": {"model": "model"},
        "proxy": {"port": port},
        "harnesses": [{"name": "react"}],
        "tasks": {"train": "tasks"},
        "train": {"steps": 1},
        "eval": {"before": False, "after": False},
        "ray": {"address": "local"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_the_config_of_these_tests_is_good(config: Path, tmp_path: Path) -> None:
    done = forge_ray("check", str(config), "--quick", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert f"run directory: {tmp_path / 'runs' / 'bad'}" in done.stdout


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.setps=3", ("train.setps", "train.steps")),
        ("train.steps=many", ("train.steps", "'many'")),
        ("policy.model=Org/Name", ("policy.model", "Org/Name does not exist", "hf download")),
        ("policy.chat_template=tasks", ("policy.chat_template: ", "tasks is no file")),
        ("policy.chat_template=broken.py", ("policy.chat_template: ", "broken.py is no Jinja template (line 1")),
        ("policy.model=tasks", ("policy.model", "no config.json")),
        ("policy.model=nowhere.py:make", ("policy.model", "nowhere.py does not exist")),
        ("policy.model=plain", ("policy.model", "plain has no weights")),
        ("policy.model=makers.py:make", ("policy.model", "makers.py has no function 'make'; it has other")),
        ("policy.model=broken.py:make", ("policy.model", "broken.py:1 is no Python")),
        ("policy.script=run.yaml", ("policy.script", "run.yaml", "no JSON")),
        ("sandbox.directory=run.yaml", ("sandbox.directory", "run.yaml is no directory")),
        ("train.workers=1000", ("train.workers", "take 1000 CPUs", "own cluster has")),
        ("tasks.train=nowhere", ("tasks.train", "nowhere does not exist")),
        ("tasks.train=model", ("tasks.train", "model")),
        ("harnesses.0.name=no_such", ("no_such",)),
        ("harnesses.0.options.ouput_chars=3", ("ouput_chars",)),
        ("harnesses.0.name=own.py:Own", ("own.py:Own", "it cannot be checked (OSError: no luck)")),
        ("harnesses.0.name=own.py:Gives", ("own.py:Gives", "configure gives None, which is no Command; mend the file")),
    ],
)
def test_a_wrong_value(command: str, override: str, expected: tuple[str, ...], config: Path, tmp_path: Path) -> None:
    done = forge_ray(command, str(config), override, cwd=tmp_path)
    refused(done, *expected)
    assert not (tmp_path / "runs").exists()


def test_a_wrong_value_of_an_ablation_is_said_before_its_first_run(config: Path, tmp_path: Path) -> None:
    refused(forge_ray("ablate", str(config), "--over", "train.workers=1,1000", cwd=tmp_path), "train.workers", "take 1000 CPUs")
    assert not any(tmp_path.glob("runs/*/*seed*"))


@pytest.mark.parametrize("override", ["runs=run.yaml", "runs=run.yaml/below", "runs=holder"])
def test_a_file_where_the_run_directory_should_be(override: str, config: Path, tmp_path: Path) -> None:
    (tmp_path / "holder").mkdir()
    (tmp_path / "holder" / "bad").write_text("")
    for command in ("check", "train"):
        refused(forge_ray(command, str(config), override, cwd=tmp_path), "runs: ", "is no directory")


def test_no_config_file(tmp_path: Path) -> None:
    for command in ("check", "train", "eval"):
        refused(forge_ray(command, "nowhere.yaml", cwd=tmp_path), "nowhere.yaml: no such file")
    refused(forge_ray("rollout", "nowhere.yaml", "--task", "t", cwd=tmp_path), "nowhere.yaml: no such file")
    refused(forge_ray("train", cwd=tmp_path), "no config given")
    (tmp_path / "bad.yaml").write_text("name: x\n  policy: y\n")
    refused(forge_ray("train", "bad.yaml", cwd=tmp_path), "bad.yaml:2", "not valid YAML")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "command line: the following arguments are required: command; see forge-ray --help"),
        (["trian", "run.yaml"], "'trian' (choose from"),
        (["eval", "run.yaml", "--k", "four"], "argument --k: invalid int value: 'four'; see forge-ray eval --help"),
        (["train", "--resum", "run"], "--resum"),
    ],
)
def test_a_wrong_word_on_the_command_line(words: list[str], expected: str, tmp_path: Path) -> None:
    refused(forge_ray(*words, cwd=tmp_path), expected)


def test_an_unknown_task_is_refused_before_ray_starts_and_leaves_no_run(config: Path, tmp_path: Path) -> None:
    done = forge_ray("rollout", str(config), "--task", "nowhere", cwd=tmp_path)
    refused(done, "no task 'nowhere'", "such as one")
    assert "Ray" not in done.stdout
    refused(forge_ray("eval", str(config), cwd=tmp_path), "tasks.heldout is not set")
    assert list((tmp_path / "runs").glob("*")) == []


def test_a_function_that_fails_leaves_its_output_and_the_name(config: Path, tmp_path: Path) -> None:
    (tmp_path / "makers.py").write_text("def make(out, seed):\n    print('it begins')\n    raise RuntimeError('no luck')\n")
    for _ in range(2):
        done = forge_ray("train", str(config), "tasks.train=makers.py:make", cwd=tmp_path)
        refused(done, "tasks.train: makers.py:make failed (RuntimeError: no luck); its output is in ", "inputs/tasks-train.log")
        assert "Ray" not in done.stdout
    run = tmp_path / "runs" / "bad"
    assert [file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file()] == ["inputs/tasks-train.log"]


def test_an_unreadable_task_is_named(config: Path, tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "broken", toml="[agent\n")
    refused(forge_ray("train", str(config), cwd=tmp_path), "broken", "task.toml")


def test_missing_harness_programs(config: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for harness in ("codex", "claude_code"):
        done = forge_ray("train", str(config), f"harnesses.0.name={harness}", cwd=tmp_path, FORGE_RAY_CACHE=str(empty), PATH=str(empty))
        refused(done, harness, "is not installed", "forge_ray.harnesses.install")


def test_installing_a_harness_without_npm(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forge_ray.harnesses.install", "codex"],
        env={**os.environ, "FORGE_RAY_CACHE": str(tmp_path), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "npm is not on PATH" in line and "apt-get install npm" in line


def test_a_port_in_use(config: Path, taken: int, tmp_path: Path) -> None:
    refused(forge_ray("train", str(config), f"proxy.port={taken}", cwd=tmp_path), "proxy.port", str(taken))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["check", "train", "rollout", "eval"])
def test_an_address_that_only_job_submission_understands(command: str, config: Path, tmp_path: Path) -> None:
    words = [command, str(config), "ray.address=null", *(["--task", "one"] if command == "rollout" else [])]
    refused(forge_ray(*words, cwd=tmp_path, RAY_ADDRESS="http://127.0.0.1:8265"), "RAY_ADDRESS", "unset", "host:6379")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", "no cluster answers"),
        ("ray://127.0.0.1:10001", "Ray Client"),
        ("nonsense", "no host:port"),
        ("auto", "no Ray cluster"),
    ],
)
def test_an_address_where_no_cluster_is(address: str, expected: str, config: Path, tmp_path: Path) -> None:
    if address == "auto" and Path("/tmp/ray/ray_current_cluster").is_file():
        pytest.skip("a Ray cluster of this machine may be running")
    refused(forge_ray("train", str(config), "ray.address=null", cwd=tmp_path, RAY_ADDRESS=address), "RAY_ADDRESS", expected)


@pytest.mark.parametrize("said", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_an_address_where_something_else_answers(said: bytes | None, config: Path, tmp_path: Path) -> None:
    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if said is None:
                held.append(connection)  # and says nothing
                continue
            connection.sendall(said)
            connection.close()

    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = forge_ray("train", str(config), "ray.address=null", cwd=tmp_path, RAY_ADDRESS=address)
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up: later tests fork
        thread.join()
    refused(done, "RAY_ADDRESS", f"no cluster answers at {address}")


def test_a_run_directory_that_exists(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "bad"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    refused(forge_ray("train", str(config), cwd=tmp_path), str(run), "exists", "--resume")
    assert [entry.name for entry in run.iterdir()] == ["metrics.jsonl"]


def test_resuming_what_is_no_run(config: Path, tmp_path: Path) -> None:
    refused(forge_ray("train", "--resume", "nowhere", cwd=tmp_path), "--resume", "nowhere")
    refused(forge_ray("train", "--resume", str(tmp_path), cwd=tmp_path), "--resume", "no run directory")
    refused(forge_ray("train", str(config), "--resume", str(tmp_path), cwd=tmp_path), "--resume", "leave out")


def test_a_run_that_is_being_driven(config: Path, tmp_path: Path) -> None:
    run = state.create(load(config))  # and held by this process from now on
    refused(forge_ray("train", "--resume", str(run.root), cwd=tmp_path), str(run.root), "another process")


def test_a_run_directory_nobody_can_make(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(forge_ray("train", str(config), f"runs={tmp_path}/file/runs", cwd=tmp_path), "runs", "file")


def test_a_store_that_cannot_be(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(forge_ray("train", str(config), f"store.location={tmp_path}/file/data", cwd=tmp_path), "store", "file")
    refused(forge_ray("check", str(config), "--quick", "store.location=nowhere://data", cwd=tmp_path), "store", "nowhere://data")


def test_a_checkpoint_that_is_none(config: Path, tmp_path: Path) -> None:
    refused(forge_ray("eval", str(config), "--checkpoint", "nowhere", cwd=tmp_path), "nowhere", "no model directory")
    refused(forge_ray("eval", str(config), "--checkpoint", "latest", cwd=tmp_path), "--checkpoint latest", "no checkpoint")
    refused(forge_ray("eval", str(config), "--k", "0", cwd=tmp_path), "--k")
    refused(forge_ray("rollout", str(config), "--task", "one", "--harness", "h", cwd=tmp_path), "--harness", "react")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_needs_nothing_heavy(command: str, tmp_path: Path) -> None:
    words = [word for word in (command, "--help") if word]
    code = (
        "import json, sys\n"
        "from forge_ray.cli.main import main\n"
        "try:\n    main(json.loads(sys.argv[1]))\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(words)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: forge-ray")


def test_options_that_take_a_value_are_known() -> None:
    """A word with `=` behind one of them is its value and no override."""
    (commands,) = (action for action in main.parser()._actions if isinstance(action, argparse._SubParsersAction))
    with_overrides = [command for name, command in commands.choices.items() if name not in main.PLAIN]
    taking = {option for command in with_overrides for action in command._actions if action.nargs != 0 for option in action.option_strings}
    assert taking == main.OPTIONS
    assert main.arguments(["ablate", "run.yaml", "--over", "train.steps=1,2", "seed=3"]).overrides == ["seed=3"]
