"""What each adapter asks for, how it reads its program's last words, and how adapters are found."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from forge_ray.errors import UserError
from forge_ray.harnesses import react_program
from forge_ray.harnesses.harness import BUILT_IN, Harness, Launch, get
from forge_ray.harnesses.install.__main__ import main as install
from forge_ray.harnesses.settings import merge, toml

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


PI = str(Path(__file__).resolve().parents[2] / "examples" / "pi" / "harness.py") + ":Pi"
ALL = [*BUILT_IN, PI]
REAL = [name for name in ALL if name != "react"]


@pytest.mark.parametrize("name", ALL)
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


ARGUMENT_ONLY = ["zeroclaw", "kimi_code", PI]


@pytest.mark.parametrize("name", [name for name in ALL if name not in ARGUMENT_ONLY])
def test_an_instruction_too_long_for_an_argument_travels_otherwise(name: str) -> None:
    long = "é" * 70_000
    command = get(name).configure(replace(LAUNCH, instruction=long))
    assert max(len(argument.encode()) for argument in command.argv) < 1000
    written = [text for path, text in command.home_files.items() if path.endswith((".md", ".yaml"))]
    assert command.stdin == long or any(text == long or yaml.safe_load(text)["run"]["task"] == long for text in written)


@pytest.mark.parametrize("name", ARGUMENT_ONLY)
def test_an_instruction_too_long_for_an_argument_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="has 140000 bytes"):
        get(name).configure(replace(LAUNCH, instruction="é" * 70_000))


@pytest.mark.parametrize("name", ALL)
def test_options_of_every_adapter(name: str) -> None:
    command = get(name, {"arguments": ["--one-more"], "environment": {"ONE_MORE": "1"}}).configure(LAUNCH)
    assert "--one-more" in command.argv and command.env["ONE_MORE"] == "1"


@pytest.mark.parametrize("name", [name for name in REAL if name not in ("claude_code", PI)])
def test_every_real_program_is_told_the_window_and_the_cap(name: str) -> None:
    command = get(name).configure(replace(LAUNCH, context_window=54321, max_output=777))
    told = " ".join([*command.argv, *command.env.values(), *command.home_files.values()])
    if name not in ("mini_swe_agent", "gemini_cli"):  # one knows no window, the other a share of a million
        assert "54321" in told
    if name != "codex":  # has no such setting
        assert "777" in told


@pytest.mark.parametrize("name", REAL)
def test_what_a_sandbox_must_show_is_where_the_program_is(name: str, empty_cache: Path) -> None:
    command = get(name).configure(LAUNCH)
    assert str(empty_cache) in command.argv[0] and any(command.argv[0].startswith(path) for path in command.visible)
    assert all(not path.startswith("/") for path in (*command.home_files, *command.workspace_files))
    assert not command.workspace_files  # the verifier sees the workspace


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_what_a_person_should_know(name: str) -> None:
    about = get(name).about
    assert about is not None and about.dialects
    assert set(about.dialects) <= {"chat", "responses", "messages", "gemini"}


def test_qwen_code() -> None:
    command = get("qwen_code", {"settings": {"general": {"vimMode": True}}}).configure(replace(LAUNCH, max_output=512))
    settings = json.loads(command.home_files[".qwen/settings.json"])
    assert settings["general"] == {"enableAutoUpdate": False, "vimMode": True}
    assert settings["privacy"]["usageStatisticsEnabled"] is False and settings["telemetry"]["enabled"] is False
    assert settings["model"]["generationConfig"]["contextWindowSize"] == 65536
    assert command.env["OPENAI_BASE_URL"] == "http://10.0.0.1:18700/s/t0ken/v1" and command.env["OPENAI_MODEL"] == "policy"
    assert command.env["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "512"
    assert command.argv[-2:] == ("-p", LAUNCH.instruction) and "--yolo" in command.argv


def test_gemini_cli() -> None:
    command = get("gemini_cli").configure(replace(LAUNCH, max_output=512))
    settings = json.loads(command.home_files[".gemini/settings.json"])
    assert command.env["GOOGLE_GEMINI_BASE_URL"] == "http://10.0.0.1:18700/s/t0ken"  # it adds /v1beta itself
    assert command.env["GEMINI_API_KEY"] == "t0ken"
    assert command.argv[command.argv.index("-m") + 1] == "policy"  # else it asks a router first
    assert settings["model"]["compressionThreshold"] * 1_048_576 == pytest.approx(0.7 * 65536)
    (override,) = settings["modelConfigs"]["customOverrides"]
    assert override["match"] == {"model": "policy"}
    assert override["modelConfig"] == {"generateContentConfig": {"maxOutputTokens": 512}}


@pytest.mark.parametrize(
    ("dialect", "sdk"), [("chat", "@ai-sdk/openai-compatible"), ("responses", "@ai-sdk/openai"), ("messages", "@ai-sdk/anthropic")]
)
def test_opencode(dialect: str, sdk: str) -> None:
    command = get("opencode", {"dialect": dialect, "config": {"permission": {"webfetch": "deny"}}}).configure(LAUNCH)
    config = json.loads(command.home_files[".config/opencode/opencode.json"])
    provider = config["provider"]["forge_ray"]
    assert provider["npm"] == sdk and provider["options"] == {"baseURL": "http://10.0.0.1:18700/s/t0ken/v1", "apiKey": "t0ken"}
    assert provider["models"]["policy"]["limit"] == {"context": 65536, "output": 32000}
    assert config["permission"] == {"*": "allow", "webfetch": "deny"} and config["share"] == "disabled"
    assert command.env["OPENCODE_CONFIG"] == "/home/agent/.config/opencode/opencode.json"
    assert command.argv[command.argv.index("-m") + 1] == "forge_ray/policy" and command.argv[-2:] == ("--", LAUNCH.instruction)


def test_kimi_code() -> None:
    command = get("kimi_code", {"config": {"models": {"policy": {"capabilities": ["tool_use"]}}}}).configure(LAUNCH)
    config = tomllib.loads(command.home_files[".kimi-code/config.toml"])
    model = config["models"][config["default_model"]]
    assert model == {"provider": "forge_ray", "model": "policy", "max_context_size": 65536, "capabilities": ["tool_use"]}
    assert config["providers"]["forge_ray"]["base_url"] == "http://10.0.0.1:18700/s/t0ken/v1" and config["telemetry"] is False
    assert command.env["KIMI_CODE_HOME"] == "/home/agent/.kimi-code"


def test_openclaw() -> None:
    command = get("openclaw").configure(LAUNCH)
    config = json.loads(command.home_files[".openclaw/openclaw.json"])
    provider = config["models"]["providers"]["forge_ray"]
    assert provider["baseUrl"] == "http://10.0.0.1:18700/s/t0ken/v1" and provider["api"] == "openai-completions"
    assert config["agents"]["defaults"] == {"model": {"primary": "forge_ray/policy"}, "workspace": "/app", "skipBootstrap": True}
    assert command.home_files[".openclaw/instruction.md"] == LAUNCH.instruction
    assert int(command.argv[command.argv.index("--timeout") + 1]) > 7 * 24 * 3600  # its own deadline would be 600 s


def test_mini_swe_agent() -> None:
    command = get("mini_swe_agent", {"config": {"agent": {"step_limit": 30}}}).configure(replace(LAUNCH, max_output=512))
    config = yaml.safe_load(command.home_files[".mini/forge_ray.yaml"])
    assert config["run"]["task"] == LAUNCH.instruction and config["agent"] == {"cost_limit": 0, "step_limit": 30}
    assert config["model"] == {"model_kwargs": {"max_tokens": 512}}
    specs = [command.argv[place + 1] for place, word in enumerate(command.argv) if word == "-c"]
    assert specs == ["mini.yaml", "/home/agent/.mini/forge_ray.yaml"]  # the second is laid over the first
    assert command.env["OPENAI_API_BASE"] == "http://10.0.0.1:18700/s/t0ken/v1" and "openai/policy" in command.argv


@pytest.mark.parametrize(
    ("dialect", "family", "url", "wire", "cap"),
    [
        ("chat", "custom", "http://10.0.0.1:18700/s/t0ken/v1", None, None),
        ("responses", "custom", "http://10.0.0.1:18700/s/t0ken/v1", "responses", None),
        ("messages", "anthropic", "http://10.0.0.1:18700/s/t0ken", None, 65536),
    ],
)
def test_zeroclaw(dialect: str, family: str, url: str, wire: str | None, cap: int | None) -> None:
    options = {"dialect": dialect, "config": {"runtime_profiles": {"long": {"max_tool_iterations": 20}}}}
    command = get("zeroclaw", options).configure(LAUNCH)
    config = tomllib.loads(command.home_files[".zeroclaw/config.toml"])
    provider = config["providers"]["models"][family]["proxy"]
    assert (provider["uri"], provider.get("wire_api"), provider.get("max_tokens")) == (url, wire, cap)
    assert provider["native_tools"] is True and provider["context_window"] == 65536
    agent = config["agents"]["main"]
    assert agent["model_provider"] == f"{family}.proxy" and agent["workspace"]["path"] == "/app"
    assert config["risk_profiles"][agent["risk_profile"]]["level"] == "full"
    runtime = config["runtime_profiles"][agent["runtime_profile"]]
    assert runtime["strict_tool_parsing"] is True and runtime["max_tool_iterations"] == 20
    assert config["pacing"]["loop_detection_enabled"] is False
    assert command.argv[1:] == ("agent", "-a", "main", "-m", LAUNCH.instruction)


def test_toml_is_read_back() -> None:
    tree = {"a": 1, "list": [1, {"x": 'é☕\x7f\n"\\'}], "t": {"d.e": {"f": True}, "g": 0.5, "h": 1e30}, "empty": {}, "deep": {"er": {}}}
    assert tomllib.loads(toml({**tree, "left": None, "t": {**tree["t"], "out": None}})) == tree


def test_merged_settings_leave_their_parts_alone() -> None:
    base, extra = {"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"c": [2]}, "d": {"e": 3}}
    assert merge(base, extra) == {"a": {"b": 1, "c": [2]}, "d": {"e": 3}}
    assert base == {"a": {"b": 1, "c": [1]}, "d": 2}


@pytest.mark.parametrize("name", REAL)
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


QWEN_ERROR = '{"type":"result","subtype":"error_during_execution","is_error":true,"error":{"message":"[API Error: 401 boom]"}}'
GEMINI_ERROR = (
    '{"type":"result","status":"error","error":{"type":"unknown","message":"[API Error: {\\"error\\":{\\"message\\":\\"boom\\"}}]"}}'
)
OPENCODE_ERROR = '{"type":"error","sessionID":"s","error":{"name":"APIError","data":{"message":"boom","statusCode":401}}}'
OPENCODE_OVERFLOW = '{"type":"error","sessionID":"s","error":{"name":"ContextOverflowError","data":{"message":"too long"}}}'
OPENCODE_END = '{"type":"step_finish","sessionID":"s","part":{"reason":"stop"}}'
KIMI_ERROR = "error: failed to run prompt: provider.auth_error: 401 boom\nSee log: /home/agent/.kimi-code/logs/kimi-code.log\n"
OPENCLAW_ERROR = """[agent/embedded] embedded run failover decision
{
  "ok": false,
  "status": "error",
  "final": "",
  "error": {
    "message": "⚠️ forge_ray/policy request failed (authentication failed, HTTP 401). \\"Again\\".",
    "kind": "exception"
  }
}
⚠️ forge_ray/policy request failed
"""
OPENCLAW_END = '[tools] x\n{\n  "ok": true,\n  "status": "ok",\n  "final": "It holds 42."\n}\n'
MINI_ERROR = """│   515 │   │   │   │   model=model,                                          │
╰──────────────────────────────────────────────────────────────────────────────╯
AuthenticationError: litellm.AuthenticationError: AuthenticationError: 
OpenAIException - boom You can permanently set your API key with `mini-extra 
config set KEY VALUE`.
"""
PI_ERROR = '{"type":"turn_end","message":{"stopReason":"error","errorMessage":"401: boom"}}\n{"type":"agent_end","messages":[]}\n'
PI_END = '{"type":"turn_end","message":{"stopReason":"stop"}}\n{"type":"agent_end","messages":[]}\n'
LAST_WORDS = [
    ("qwen_code", 1, QWEN_ERROR, False, "401 boom"),
    ("qwen_code", 0, '{"type":"result","is_error":false,"result":"[API Error: is what I wrote"}', False, None),
    ("qwen_code", 1, "SyntaxError: Unexpected token", True, None),
    ("gemini_cli", 145, GEMINI_ERROR, False, "boom"),  # 401 modulo 256
    ("gemini_cli", 0, '{"type":"result","status":"success"}', False, None),
    ("gemini_cli", 41, "Please set an Auth method", True, None),
    ("opencode", 1, OPENCODE_ERROR, False, "boom"),
    ("opencode", 1, f"{OPENCODE_ERROR}\n{OPENCODE_END}", False, None),  # it got through at last
    ("opencode", 1, OPENCODE_OVERFLOW, False, None),
    ("opencode", 132, "panic: Illegal instruction", True, None),
    ("kimi_code", 1, KIMI_ERROR, False, "provider.auth_error: 401 boom"),
    ("kimi_code", 1, "error: failed to run prompt: agent.loop_error: x\n", False, None),
    ("kimi_code", 1, "TypeError: x is not a function", True, None),
    ("openclaw", 1, OPENCLAW_ERROR, False, '"Again"'),
    ("openclaw", 0, OPENCLAW_END, False, None),
    ("openclaw", 1, "Error: openclaw requires Node >=24.16", True, None),
    ("mini_swe_agent", 1, MINI_ERROR, False, "boom You can permanently set your API key with `mini-extra config set KEY VALUE`."),
    ("mini_swe_agent", 1, "Traceback\nKeyError: 'x'\n", True, None),
    ("mini_swe_agent", 0, "AuthenticationError: litellm.x is in a file\nExit:\n\n", False, None),
    ("zeroclaw", 1, "I write.Error: The model provider custom.proxy rejected its credentials. Check them.\n", False, "rejected"),
    ("zeroclaw", 1, "Error: The selected model provider returned a server error. Try again.\n", False, "server error"),
    ("zeroclaw", 1, "Error: The local model server at http://127.0.0.1:1/v1 is unavailable. Start it.\n", False, "unavailable"),
    ("zeroclaw", 1, "I write.Error: This request exceeds the selected model's context window. Reduce it.\n", False, None),
    ("zeroclaw", 1, "Error: The model provider returned an invalid semantic completion.\n", False, None),
    ("zeroclaw", 1, "Error: config.toml: expected a table\n", True, None),
    ("zeroclaw", 101, "thread 'main' panicked", True, None),
    (PI, 0, PI_ERROR, False, "401: boom"),
    (PI, 0, PI_END, False, None),
    (PI, 1, 'Model "x" not found', True, None),
]


@pytest.mark.parametrize(("name", "code", "log", "crashed", "no_answer"), LAST_WORDS)
def test_last_words(name: str, code: int, log: str, crashed: bool, no_answer: str | None) -> None:
    """As the programs printed them, shortened."""
    harness = get(name)
    assert (harness.crashed(code, log) is not None) == crashed
    words = harness.no_answer(code, log)
    assert (words is None) if no_answer is None else (words is not None and no_answer in words)


@pytest.mark.parametrize("name", REAL)
def test_killed_or_done_is_no_crash(name: str) -> None:
    assert get(name).crashed(None, "") is None and get(name).crashed(0, "") is None
    assert get(name).crashed(139, "") == "died of signal 11"


def test_mini_swe_agent_tells_how_it_ended() -> None:
    mini = get("mini_swe_agent")
    assert mini.submitted(0, "Tool:\n\nExit:\n\nSaved trajectory to 'x'\n")
    assert mini.submitted(0, "Tool:\n\nExit:\nthe patch\n\nSaved trajectory to 'x'\n")
    for word in ("RepeatedFormatError", "LimitsExceeded", "TimeExceeded"):
        assert not mini.submitted(0, f"Tool:\n\nExit:\n{word}\nSaved trajectory to 'x'\n")
    assert not mini.submitted(1, "\nExit:\n\n") and not mini.submitted(None, "\nExit:\n\n") and not mini.submitted(0, "")


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

class Half(Harness):
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
        ("{tmp}/mine.py:Half", {}, "Half cannot be made (TypeError: "),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path, name: str, options: dict[str, int], words: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(UserError) as error:
        get(name.replace("{tmp}", str(tmp_path)), options)
    assert words in str(error.value) and "\n" not in str(error.value)
