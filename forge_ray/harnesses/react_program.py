"""ReAct in one file: a model, a `bash` tool, a loop. It is a whole harness program, run in a process of its own.

    FORGE_RAY_KEY=… python -I -S react_program.py --base-url http://HOST:PORT/s/TOKEN/v1 --model policy INSTRUCTION_FILE

It runs in its current directory (the workspace), asks for OpenAI chat completions, and ends at the first reply without a tool
call, whose text it prints to stdout. There is no system message; the first user message is the instruction alone. The model sees
of a command what a person would: stdout and stderr together, cut to `--output-chars`.

Start-up is paid by every rollout, so only cheap parts of the standard library are imported (some 20 ms of CPU in all): no HTTP
client, no `subprocess`. `tool_text`, `TOOL`, `user_message`, `assistant_message` and `tool_message` are imported by code that renders
demonstrations, so that those look exactly like a rollout.

Exit codes: 0 a final reply, 3 the turn limit, 4 the server refused a request (any 4xx but 408, 425 and 429; a full context is such a 400),
5 the server could not be reached or kept failing, 2 bad usage. Request and response errors go to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
"""The one tool, in the form of OpenAI chat completions."""

DONE, TURN_LIMIT, REFUSED, UNREACHABLE = 0, 3, 4, 5
"""Exit codes."""

KEPT_BYTES = 4 * 2**20
"""Bytes of a command's output that are kept; the rest is read and dropped, so that the command does not block."""

_BASH_PREFIX = re.compile(r"bash: line \d+: ")


# --- messages -------------------------------------------------------------------------------------------------------------------


def user_message(instruction: str) -> dict[str, Any]:
    """The first message: the task's instruction, stripped."""
    return {"role": "user", "content": instruction.strip()}


def assistant_message(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply as it goes back into the history: content, tool calls and reasoning as the server gave them, nothing else."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.get("content")}
    for key in ("reasoning", "reasoning_content"):
        if reply.get(key):
            message[key] = reply[key]
    if reply.get("tool_calls"):
        message["tool_calls"] = [
            {"id": call.get("id", ""), "type": "function", "function": {k: call["function"].get(k) or "" for k in ("name", "arguments")}}
            for call in reply["tool_calls"]
        ]
    return message


def tool_message(call_id: str, text: str) -> dict[str, Any]:
    """The result of one tool call; `text` is what `tool_text` made."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def tool_text(raw: str, limit: int) -> str:
    """What the model sees of a command's output: without every "bash: line N: ", stripped, the first `limit` characters."""
    return _BASH_PREFIX.sub("", raw).strip()[:limit]


def command_of(call: dict[str, Any]) -> tuple[str | None, str]:
    """`(command, "")` of a tool call, or `(None, what is wrong with it)`: that text is then the call's result."""
    function = call.get("function") or {}
    if function.get("name") != "bash":
        return None, f"error: no tool {function.get('name')!r}"
    try:
        arguments = json.loads(function.get("arguments") or "")
    except ValueError:
        return None, "error: the arguments are not valid JSON"
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str) or "\0" in command:
        return None, "error: command must be a string"
    return command, ""


# --- commands -------------------------------------------------------------------------------------------------------------------


def run_bash(command: str, timeout_s: float) -> str:
    """Run `bash -c command` in the current directory, stdin empty; return stdout and stderr in the order in which they were written.

    Returns when bash itself has ended, whatever it left in the background: such a child keeps running and may go on writing (its
    output is dropped). After `timeout_s` seconds the command's process group is killed and the text says so.
    """
    reader, writer = os.pipe()  # close-on-exec: the program's own ends never reach the command
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        pid = os.posix_spawnp(
            "bash",
            ["bash", "-c", command],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_DUP2, writer, 2)],
            setsid=True,
            setsigdef=[signal.SIGPIPE],  # Python ignores it, and an ignored signal would be inherited
        )
    except OSError as error:
        os.close(reader)
        return f"error: cannot run bash: {error}"
    finally:
        os.close(writer)
        os.close(null)
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(ended, select.POLLIN)
    os.set_blocking(reader, False)
    kept, notice, open_end = bytearray(), "", True
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            notice = f"[killed: still running after {timeout_s:g} s]\n"  # in front: the end of a long output is cut
            _kill_group(pid)
            break
        ready = dict(poll.poll(left * 1000))
        if reader in ready and not _read(reader, kept):
            poll.unregister(reader)
            open_end = False
        if ended in ready:
            break
    os.waitpid(pid, 0)
    os.close(ended)
    # What bash wrote is in the pipe by now; at most a pipe's content is read on, as a child in the background may write for ever.
    for _ in range(32):
        if not open_end:
            break
        before = len(kept)
        open_end = _read(reader, kept)
        if len(kept) == before:
            break
    if open_end:
        _drop_rest(reader)
    else:
        os.close(reader)
    return notice + kept.decode("utf-8", "replace")


def _read(reader: int, kept: bytearray) -> bool:
    """Read what is there into `kept`, up to its bound; False at end of file."""
    try:
        data = os.read(reader, 65536)
    except BlockingIOError:
        return True
    kept.extend(data[: max(0, KEPT_BYTES - len(kept))])
    return bool(data)


def _kill_group(pid: int) -> None:
    # The command is the leader of a session and group of its own and not yet reaped, so the number is still its.
    os.killpg(pid, signal.SIGKILL)


def _drop_rest(reader: int) -> None:
    """Keep a background child from blocking on a full pipe or dying of SIGPIPE: read in a thread that nobody waits for."""
    import _thread

    os.set_blocking(reader, True)

    def drain() -> None:
        while os.read(reader, 65536):
            pass
        os.close(reader)

    _thread.start_new_thread(drain, ())


# --- the model ------------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The server will not answer this request, however often it is sent."""


class Unreachable(Exception):
    """No whole answer within the time for retries."""


class _Passing(Exception):
    """A failure worth another try; `wait` is the server's retry-after in seconds."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class Model:
    """A client of one chat-completions endpoint: plain HTTP/1.1, one connection per request."""

    def __init__(self, base_url: str, model: str, key: str, *, stream: bool, retry_s: float, request_timeout_s: float) -> None:
        scheme, _, rest = base_url.partition("://")
        address, _, path = rest.partition("/")
        if scheme not in ("http", "https") or not address:
            raise SystemExit(f"react: {base_url!r} is no http or https URL")
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit():
            host, port = address, "443" if scheme == "https" else "80"
        self.host, self.port, self.tls, self.address = host.strip("[]"), int(port), scheme == "https", address
        self.path = f"/{path.rstrip('/')}/chat/completions".replace("//", "/")
        self.model, self.key, self.stream = model, key, stream
        self.retry_s, self.request_timeout_s = retry_s, request_timeout_s

    def reply(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply to `messages`, `{"content", "tool_calls", …}`. Tries again after lost connections, 408, 425, 429 and 5xx, for
        `retry_s` seconds from the first failure on, with the waiting time that the server asks for, else 0.5 s doubled up to 8 s."""
        body: dict[str, Any] = {"model": self.model, "messages": messages, "tools": [TOOL]}
        if self.stream:
            body["stream"] = True
        data = json.dumps(body).encode()
        delay, give_up = 0.5, None
        while True:
            try:
                return self._ask(data)
            except (_Passing, OSError) as error:
                now = time.monotonic()
                give_up = now + self.retry_s if give_up is None else give_up
                wait = getattr(error, "wait", None)
                wait = delay if wait is None else wait
                if now + wait > give_up:
                    raise Unreachable(f"gave up after {self.retry_s:g} s of tries: {error}") from None
                print(f"react: {error}; next try in {wait:g} s", file=sys.stderr, flush=True)
                time.sleep(wait)
                delay = min(delay * 2, 8.0)

    def _ask(self, data: bytes) -> dict[str, Any]:
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.address}\r\nAuthorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"Accept: application/json\r\nUser-Agent: forge-ray-react\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        with socket.create_connection((self.host, self.port), timeout=30) as plain:
            plain.settimeout(self.request_timeout_s)
            connection = plain
            if self.tls:
                import ssl

                connection = ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)
            connection.sendall(head.encode() + data)
            with connection.makefile("rb") as file:
                status, headers = _head(file)
                body = _body(file, headers)
                if status == 200:
                    return _streamed(body) if "text/event-stream" in headers.get("content-type", "") else _whole(body)
                text = b"".join(body).decode("utf-8", "replace").strip()
        if status in (408, 425, 429) or status >= 500:
            after = headers.get("retry-after", "")
            wait = min(float(after), 60.0) if re.fullmatch(r"\d+(\.\d+)?", after) else None
            raise _Passing(f"HTTP {status}: {text[:300]}", wait)
        raise Refused(f"HTTP {status}: {text[:2000]}")


def _head(file: Any) -> tuple[int, dict[str, str]]:
    while True:
        line = file.readline(65536).decode("latin-1")
        parts = line.split(None, 2)
        if len(parts) < 2 or not parts[1].isdigit():
            raise _Passing("the connection was closed without an answer" if not line else f"not an HTTP answer: {line[:80]!r}")
        headers: dict[str, str] = {}
        while (line := file.readline(65536).decode("latin-1")) not in ("\r\n", "\n"):
            if not line:
                raise _Passing("the connection was closed within the headers")
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if parts[1] != "100":
            return int(parts[1]), headers


def _body(file: Any, headers: dict[str, str]) -> Iterator[bytes]:
    """The body in pieces; a body that stops early raises `_Passing`."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while True:
            size = file.readline(1024).split(b";")[0].strip()
            try:
                length = int(size, 16)
            except ValueError:
                raise _Passing("the answer was cut off") from None
            if length == 0:
                return
            data = file.read(length)
            if len(data) < length or file.readline(8) not in (b"\r\n", b"\n"):
                raise _Passing("the answer was cut off")
            yield data
    elif "content-length" in headers:
        length = int(headers["content-length"])
        data = file.read(length)
        if len(data) < length:
            raise _Passing("the answer was cut off")
        yield data
    else:
        while data := file.read1(65536):
            yield data


def _whole(body: Iterator[bytes]) -> dict[str, Any]:
    try:
        message = json.loads(b"".join(body))["choices"][0]["message"]
    except (ValueError, LookupError, TypeError):
        raise _Passing("the answer is no chat completion") from None
    if not isinstance(message, dict):
        raise _Passing("the answer is no chat completion")
    return message


def _streamed(body: Iterator[bytes]) -> dict[str, Any]:
    """Put a server-sent event stream together. A stream without `[DONE]` was cut, and what came of it is thrown away."""
    reply: dict[str, Any] = {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    rest, done = b"", False
    for piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                raise _Passing("an event of the stream is not JSON") from None
            if event.get("error"):
                raise _Passing(f"error within the stream: {str(event['error'])[:300]}")
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                for key in ("content", "reasoning", "reasoning_content"):
                    if delta.get(key):
                        reply[key] = (reply.get(key) or "") + delta[key]
                for part in delta.get("tool_calls") or ():
                    call = calls.setdefault(part.get("index", 0), {"id": "", "function": {"name": "", "arguments": ""}})
                    call["id"] = part.get("id") or call["id"]
                    for key, value in (part.get("function") or {}).items():
                        if key in ("name", "arguments") and value:
                            call["function"][key] += value
    if not done:
        raise _Passing("the stream was cut off")
    if calls:
        reply["tool_calls"] = [calls[index] for index in sorted(calls)]
    return reply


# --- the loop -------------------------------------------------------------------------------------------------------------------


def solve(model: Model, instruction: str, *, max_turns: int | None, output_chars: int, command_timeout_s: float) -> tuple[int, str]:
    """Run the loop; returns the exit code and the text that ends it."""
    messages = [user_message(instruction)]
    turn = 0
    while max_turns is None or turn < max_turns:
        turn += 1
        try:
            reply = model.reply(messages)
        except Refused as error:
            return REFUSED, f"react: the request was refused: {error}"
        except Unreachable as error:
            return UNREACHABLE, f"react: {error}"
        if not reply.get("tool_calls"):
            return DONE, reply.get("content") or ""
        messages.append(assistant_message(reply))
        for call in reply["tool_calls"]:
            command, problem = command_of(call)
            raw = problem if command is None else run_bash(command, command_timeout_s)
            text = tool_text(raw, output_chars)
            print(f"$ {command or problem}\n{text}", file=sys.stderr, flush=True)
            messages.append(tool_message(call.get("id", ""), text))
    return TURN_LIMIT, f"react: ended after {max_turns} turns"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="react", description="A ReAct loop with a bash tool.")
    parser.add_argument("instruction_file")
    parser.add_argument("--base-url", required=True, help="up to and with /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-turns", type=int, help="replies of the model; default: no limit")
    parser.add_argument("--output-chars", type=int, default=4000, help="characters of a command's output shown to the model")
    parser.add_argument("--command-timeout", type=float, default=120.0, help="seconds")
    parser.add_argument("--retry-seconds", type=float, default=300.0, help="how long a failing request is tried again")
    parser.add_argument("--request-timeout", type=float, default=1800.0, help="seconds without a byte from the server")
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args(arguments)
    with open(given.instruction_file, encoding="utf-8") as file:
        instruction = file.read()
    model = Model(
        given.base_url,
        given.model,
        os.environ.pop("FORGE_RAY_KEY", "none"),  # popped: the commands that the model runs have no use for it
        stream=given.stream,
        retry_s=given.retry_seconds,
        request_timeout_s=given.request_timeout,
    )
    code, text = solve(
        model,
        instruction,
        max_turns=given.max_turns,
        output_chars=given.output_chars,
        command_timeout_s=given.command_timeout,
    )
    print(text, file=sys.stdout if code == DONE else sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
