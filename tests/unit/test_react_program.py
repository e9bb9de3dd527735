"""The ReAct program as a process, against a small HTTP server that answers from a list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forge_ray.harnesses import react_program
from forge_ray.harnesses.react_program import run_bash, tool_text

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers the n-th request by the n-th function (the last one for ever) and keeps the requests."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                server.headers.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
                server.requests.append(json.loads(body))
                server.answers[min(len(server.requests), len(server.answers)) - 1](self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/s/t0ken/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def send(status: int, body: bytes, kind: str = "application/json", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def call(arguments: str, name: str = "bash", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def bash(command: str, id: str = "c1") -> dict[str, Any]:
    return call(json.dumps({"command": command}), id=id)


def reply(content: str | None, *calls: dict[str, Any], **more: Any) -> Answer:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls), **more}
    return send(200, json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode())


def stream(*deltas: dict[str, Any], done: bool = True, chunks: int = 7) -> Answer:
    """An event stream in chunked encoding, cut into pieces of `chunks` bytes."""
    text = "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': d}]})}\n\n" for d in deltas) + (
        "data: [DONE]\n\n" if done else ""
    )
    data = text.encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for first in range(0, len(data), chunks):
            piece = data[first : first + chunks]
            handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if done:
            handler.wfile.write(b"0\r\n\r\n")
        else:
            handler.close_connection = True

    return answer


def drop(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.close()
    handler.close_connection = True


def cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


class Finished:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def run(server: Server | str, workspace: Path, *options: str, instruction: str = "  Write 42 to answer.txt\n") -> Finished:
    (workspace.parent / "instruction.md").write_text(instruction)
    url = server if isinstance(server, str) else server.url
    done = subprocess.run(
        [sys.executable, "-I", "-S", react_program.__file__, "../instruction.md", "--base-url", url, "--model", "policy", *options],
        cwd=workspace,
        env={"PATH": os.environ["PATH"], "FORGE_RAY_KEY": "t0ken"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    return tmp_path / "ws"


def test_a_whole_episode(server: Server, workspace: Path) -> None:
    server.answers = [
        reply(None, bash("echo 42 > answer.txt; ls nothing")),
        reply("two", bash("cat answer.txt", "c2"), bash("pwd", "c3"), reasoning="hm"),
        reply("Done"),
    ]
    done = run(server, workspace)
    assert (done.code, done.out) == (0, "Done\n")
    assert (workspace / "answer.txt").read_text() == "42\n"
    assert server.headers[0]["path"] == "/s/t0ken/v1/chat/completions"
    assert server.headers[0]["authorization"] == "Bearer t0ken"
    first, _, last = server.requests
    assert first == {"model": "policy", "messages": [{"role": "user", "content": "Write 42 to answer.txt"}], "tools": [react_program.TOOL]}
    assert last["messages"] == [
        {"role": "user", "content": "Write 42 to answer.txt"},
        {"role": "assistant", "content": None, "tool_calls": [bash("echo 42 > answer.txt; ls nothing")]},
        {"role": "tool", "tool_call_id": "c1", "content": "ls: cannot access 'nothing': No such file or directory"},
        {
            "role": "assistant",
            "content": "two",
            "reasoning": "hm",
            "tool_calls": [bash("cat answer.txt", "c2"), bash("pwd", "c3")],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "42"},
        {"role": "tool", "tool_call_id": "c3", "content": str(workspace)},
    ]


def test_arguments_go_back_byte_for_byte(server: Server, workspace: Path) -> None:
    odd = '{ "command" :  "echo \\u00e9" }'
    server.answers = [reply(None, call(odd)), reply("Done")]
    assert run(server, workspace).code == 0
    assert server.requests[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == odd
    assert server.requests[1]["messages"][2]["content"] == "é"


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (call('{"command": "x'), "error: the arguments are not valid JSON"),
        (call('["ls"]'), "error: command must be a string"),
        (call('{"command": 3}'), "error: command must be a string"),
        (call('{"command": "a\\u0000b"}'), "error: command must be a string"),
        (call("{}", name="python"), "error: no tool 'python'"),
    ],
)
def test_a_bad_tool_call_is_answered(server: Server, workspace: Path, bad: dict[str, Any], text: str) -> None:
    server.answers = [reply(None, bad), reply("Done")]
    assert run(server, workspace).code == 0
    assert server.requests[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": text}


def test_streamed(server: Server, workspace: Path) -> None:
    server.answers = [
        stream(
            {"role": "assistant", "content": "I wr"},
            {"content": "ite"},
            {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "bash", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"command": "ec'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": 'ho ü > a"}'}}]},
            {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "bash", "arguments": '{"command": "cat a"}'}}]},
        ),
        stream({"content": "Do"}, {"content": "ne"}),
    ]
    done = run(server, workspace, "--stream")
    assert (done.code, done.out) == (0, "Done\n")
    assert server.requests[0]["stream"] is True
    assistant, _, result = server.requests[1]["messages"][1:]
    assert assistant["content"] == "I write"
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == ['{"command": "echo ü > a"}', '{"command": "cat a"}']
    assert result == {"role": "tool", "tool_call_id": "c2", "content": "ü"}


def test_passing_failures_are_tried_again_with_the_same_body(server: Server, workspace: Path) -> None:
    server.answers = [drop, send(500, b"oops"), send(503, b"", retry_after="0"), cut, send(429, b"", retry_after="1"), reply("Done")]
    done = run(server, workspace)
    assert (done.code, done.out) == (0, "Done\n")
    assert len(server.requests) == 6
    assert all(body == server.requests[0] for body in server.requests)
    waits = [line.rpartition("next try in ")[2] for line in done.err.splitlines()]
    assert waits == ["0.5 s", "1 s", "0 s", "4 s", "1 s"]  # retry-after where the server gave one, else doubled


def test_a_cut_stream_is_no_answer(server: Server, workspace: Path) -> None:
    server.answers = [stream({"content": "half of it"}, done=False), stream({"content": "whole"})]
    done = run(server, workspace, "--stream")
    assert (done.code, done.out) == (0, "whole\n")


def test_a_refusal_ends_it_at_once(server: Server, workspace: Path) -> None:
    server.answers = [reply(None, bash("echo hi > a")), send(400, b'{"error": {"message": "maximum context length"}}'), reply("never")]
    done = run(server, workspace)
    assert done.code == react_program.REFUSED
    assert len(server.requests) == 2
    assert "maximum context length" in done.err
    assert (workspace / "a").read_text() == "hi\n"


def test_it_gives_up_after_the_time_for_retries(server: Server, workspace: Path) -> None:
    server.answers = [send(500, b"still broken")]
    done = run(server, workspace, "--retry-seconds", "1")
    assert done.code == react_program.UNREACHABLE
    assert "still broken" in done.err
    assert len(server.requests) >= 2


def test_no_server_at_all(workspace: Path) -> None:
    assert run("http://127.0.0.1:18749/v1", workspace, "--retry-seconds", "0").code == react_program.UNREACHABLE


def test_the_last_turn_s_commands_are_run(server: Server, workspace: Path) -> None:
    server.answers = [reply(None, bash("echo x >> a"))]
    done = run(server, workspace, "--max-turns", "3")
    assert done.code == react_program.TURN_LIMIT
    assert len(server.requests) == 3
    assert (workspace / "a").read_text() == "x\nx\nx\n"


def test_the_key_is_not_handed_to_commands(server: Server, workspace: Path) -> None:
    server.answers = [reply(None, bash("env")), reply("Done")]
    assert run(server, workspace).code == 0
    assert "t0ken" not in server.requests[1]["messages"][-1]["content"]


def test_a_background_child_does_not_hold_the_program_up(server: Server, workspace: Path) -> None:
    server.answers = [
        reply(None, bash("(sleep 0.3; echo late; echo alive > proof; sleep 300) & echo $! > pid; echo first")),
        reply(None, bash("for i in $(seq 100); do test -e proof && break; sleep 0.1; done; cat proof")),
        reply("Done"),
    ]
    try:
        assert run(server, workspace).code == 0
        results = [m["content"] for m in server.requests[2]["messages"] if m["role"] == "tool"]
        assert results == ["first", "alive"]  # it wrote "late" to a pipe that was still read, and lived on
    finally:
        os.kill(int((workspace / "pid").read_text()), 9)


def test_start_up_is_cheap(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", react_program.__file__, "--help"]
    before = os.times()
    for _ in range(5):
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    used = (after.children_user - before.children_user + after.children_system - before.children_system) / 5
    assert used < 0.2, f"{used:.3f} s of CPU"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_bash_keeps_the_order_of_both_streams(here: Path) -> None:
    assert run_bash("echo a; echo b >&2; echo c", 30) == "a\nb\nc\n"


def test_run_bash_has_an_empty_stdin_and_the_default_sigpipe(here: Path) -> None:
    assert run_bash("cat; yes | head -1; echo ${PIPESTATUS[0]}", 30) == "y\n141\n"


def test_run_bash_kills_a_command_that_hangs(here: Path) -> None:
    text = run_bash("trap '' TERM; echo before; sleep 300 & wait", 0.5)
    assert text == "[killed: still running after 0.5 s]\nbefore\n"


def test_run_bash_bounds_what_it_keeps(here: Path) -> None:
    text = run_bash("yes | head -c 20000000; echo end", 60)
    assert len(text) == react_program.KEPT_BYTES


def test_run_bash_takes_bytes_that_are_no_text(here: Path) -> None:
    assert run_bash(r"printf 'a\xffb'", 30) == "a\ufffdb"


@pytest.mark.parametrize(
    ("raw", "limit", "shown"),
    [
        ("  x \n", 10, "x"),
        ("bash: line 1: foo: command not found\n", 100, "foo: command not found"),
        ("a\nbash: line 12: xbash: line 1: b: No such file or directory\nbash: line 3: c\n", 100, "a\nxb: No such file or directory\nc"),
        ("abcdef", 3, "abc"),
        ("", 3, ""),
    ],
)
def test_tool_text(raw: str, limit: int, shown: str) -> None:
    assert tool_text(raw, limit) == shown
