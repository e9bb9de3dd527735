"""What each adapter asks for, how it reads its program's last words, and how adapters are found."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from forge_ray.errors import UserError
from forge_ray.harnesses import react_program
from forge_ray.harnesses.harness import Harness, Launch, get
from forge_ray.harnesses.install.__main__ import main as install

LAUNCH = Launch(
    instruction='Write "42" to answer.txt\n',
    workspace="/app",
    home="/home/agent",
    base_url="http://10.0.0.1:18700/s/t0ken",
    key="t0ken",
    model="policy",
    context_window=65536,
)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_RAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["react", "codex", "claude_code"])
def test_two_launches_differ_in_url_and_key_only(name: str) -> None:
    one = get(name).configure(LAUNCH)
    other = get(name).configure(replace(LAUNCH, base_url="http://10.0.0.1:18700/s/other", key="other"))
    assert repr(one).replace("t0ken", "other") == repr(other)
    assert "t0ken" in repr(one)


def test_react() -> None:
    command = get("react", {"max_turns": 4, "stream": True, "output_chars": 60}).configure(LAUNCH)
    assert command.argv[1:5] == ("-I", "-S", "/home/agent/.react/react.py", "/home/agent/.react/instruction.md")
    assert command.home_files[".react/instruction.md"] == LAUNCH.instruction
    assert command.home_files[".react/react.py"] == Path(react_program.__file__).read_text()
    text = " ".join(command.argv)
    assert "--base-url http://10.0.0.1:18700/s/t0ken/v1 " in text
    assert "--max-turns 4" in text and "--stream" in text and "--output-chars 60" in text
    assert not Path(command.argv[0]).is_symlink() and command.argv[0].startswith(command.visible)


def test_codex() -> None:
    command = get("codex", {"config": {"tools.view_image": False}, "arguments": ["--ephemeral"]}).configure(LAUNCH)
    toml = tomllib.loads(command.home_files[".codex/config.toml"])
    provider = toml["model_providers"][toml["model_provider"]]
    assert toml["model"] == "policy" and toml["model_context_window"] == 65536
    assert toml["approval_policy"] == "never" and toml["sandbox_mode"] == "danger-full-access"
    assert toml["check_for_update_on_startup"] is False and toml["analytics"]["enabled"] is False
    assert provider["base_url"] == "http://10.0.0.1:18700/s/t0ken/v1" and provider["wire_api"] == "responses"
    assert command.env[provider["env_key"]] == "t0ken"
    assert command.argv[2:7] == ("exec", "--skip-git-repo-check", "--json", "-C", "/app")
    assert command.argv[-4:] == ("-c", "tools.view_image=false", "--ephemeral", LAUNCH.instruction)
    assert command.stdin is None


def test_claude_code() -> None:
    command = get("claude_code", {"environment": {"X": "1"}}).configure(replace(LAUNCH, max_output=512))
    assert command.argv[1:] == ("-p", LAUNCH.instruction, "--output-format", "json", "--dangerously-skip-permissions")
    assert command.env["ANTHROPIC_BASE_URL"] == "http://10.0.0.1:18700/s/t0ken"  # its client adds /v1 itself
    assert command.env["ANTHROPIC_API_KEY"] == "t0ken" and command.env["ANTHROPIC_MODEL"] == "policy"
    assert command.env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "512" and command.env["X"] == "1"
    for name in ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING"):
        assert command.env[name] == "1"


@pytest.mark.parametrize("name", ["codex", "claude_code"])
def test_an_instruction_too_long_for_an_argument_goes_to_stdin(name: str) -> None:
    long = "é" * 70_000
    command = get(name).configure(replace(LAUNCH, instruction=long))
    assert command.stdin == long
    assert max(len(argument.encode()) for argument in command.argv) < 1000


@pytest.mark.parametrize("name", ["codex", "claude_code"])
def test_a_missing_program_is_named_with_its_fix(name: str, empty_cache: Path) -> None:
    missing = get(name).check()
    assert missing
    assert all(f"python -m forge_ray.harnesses.install {name}" in str(line) for line in missing)


def test_installing_without_npm_names_the_fix(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    assert install(["codex"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "npm is not on PATH" in error and "apt-get install npm" in error


def test_an_installation_that_fails_leaves_nothing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = empty_cache.parent / "bin"
    tools.mkdir()
    (tools / "npm").write_text('#!/bin/sh\nmkdir -p "$3/node_modules/half"\necho "npm error code E404" >&2\nexit 1\n')
    (tools / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    assert install(["claude_code"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "E404" in error
    assert [path for path in empty_cache.iterdir() if not path.name.endswith(".lock")] == []


def test_crash_or_end() -> None:
    react, codex, claude = get("react"), get("codex"), get("claude_code")
    for code in (0, react_program.TURN_LIMIT, react_program.REFUSED, react_program.UNREACHABLE, None):
        assert react.crashed(code, "") is None
    assert react.crashed(1, "Traceback\nKeyError: 'x'\n") == "ended with exit code 1: KeyError: 'x'"
    assert react.crashed(139, "") == "died of signal 11"
    assert react.crashed(127, "") == "could not be found"
    failed = json.dumps({"type": "turn.failed", "error": {"message": "stream disconnected before completion"}}, separators=(",", ":"))
    assert codex.crashed(1, f"...\n{failed}\n") is None
    assert codex.no_answer(1, f"...\n{failed}\n") == "stream disconnected before completion"
    assert codex.crashed(101, "thread 'main' panicked") == "ended with exit code 101: thread 'main' panicked"
    assert codex.no_answer(0, '{"type":"turn.completed","usage":{}}') is None
    result = {"type": "result", "subtype": "success", "is_error": True, "result": "API Error: Connection error."}
    line = json.dumps(result, separators=(",", ":"))
    assert claude.crashed(1, line) is None and claude.no_answer(1, line) == "API Error: Connection error."
    assert claude.crashed(134, "") == "died of signal 6"
    assert claude.no_answer(0, json.dumps(result | {"is_error": False})) is None


def test_react_tells_that_it_got_no_answer() -> None:
    react = get("react")
    retrying = "$ ls\na\nreact: [Errno 111] Connection refused; next try in 8 s\n"
    assert react.no_answer(None, retrying) == "[Errno 111] Connection refused; next try in 8 s"
    assert react.no_answer(None, f"{retrying}$ cat b\n") is None  # it got through and went on
    assert react.no_answer(react_program.UNREACHABLE, "react: gave up after 300 s of tries: HTTP 500\n") is not None
    assert react.no_answer(react_program.REFUSED, "react: the request was refused: HTTP 400\n") is None


OWN = """
from forge_ray.harnesses.harness import Command, Harness, Options

class Mine(Harness):
    class Options(Options):
        greeting: str = "hi"

    def configure(self, launch):
        return Command(argv=("sh", "-c", f"echo {self.options.greeting} > {launch.workspace}/greeting"))

class Other:
    pass
"""


def test_your_own_adapter(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    harness = get(f"{tmp_path}/mine.py:Mine", {"greeting": "hello", "arguments": []})
    assert isinstance(harness, Harness)
    assert harness.configure(LAUNCH).argv[-1] == "echo hello > /app/greeting"
    assert harness.check() == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("reakt", {}, "no such harness; use one of react, codex, claude_code, zeroclaw"),
        ("react", {"max_turn": 3}, "unknown option max_turn; it has arguments, command_timeout"),
        ("react", {"max_turns": 0}, "option max_turns = 0 is refused"),
        ("{tmp}/none.py:Mine", {}, "no file"),
        ("{tmp}/mine.py:Other", {}, "no class Other"),
        ("{tmp}/broken.py:Mine", {}, "cannot be imported (SyntaxError"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path, name: str, options: dict[str, int], words: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(UserError) as error:
        get(name.replace("{tmp}", str(tmp_path)), options)
    assert words in str(error.value) and "\n" not in str(error.value)
