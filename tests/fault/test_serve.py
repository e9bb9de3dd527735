"""`forge-ray serve` from the command line: official clients take what it prints, it tells their calls, Ctrl-C ends it, replay reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from google import genai

from tests.fault.command import QUICKSTART, ROOT, Command

pytestmark = pytest.mark.timeout(900)
PORT = 18776


def exported(block: str) -> dict[str, str]:
    """The variables of a session's `export` lines."""
    lines = re.findall(r"^ +export (.+)$", block, re.MULTILINE)
    assert len(lines) == 3, block
    return dict(word.split("=", 1) for line in lines for word in line.split())


def test_a_program_is_pointed_at_it_and_its_calls_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"say": "one two"}]))
    words = ["serve", str(QUICKSTART), f"policy.script={script}", f"runs={tmp_path / 'runs'}", "ray.address=local", f"proxy.port={PORT}"]
    with Command(*words, "--session", "first", "--session", "second", directory=tmp_path) as command:
        command.until("the addresses", lambda: "calls (Ctrl-C ends):" in command.text)
        assert "window         256 tokens, 32 of them for a reply" in command.text
        first, second = command.text.split("session        first\n")[1].split("session        second\n")
        for name, value in exported(first).items():
            monkeypatch.setenv(name, value)
        chat = openai.OpenAI(max_retries=0)
        # More calls than the config's limit of four, which is a rollout's.
        for stream in (False, True):
            parts = chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], stream=stream)
            assert "one" in (str(list(parts)) if isinstance(parts, openai.Stream) else str(parts.choices[0].message.content))
        assert chat.responses.create(model="policy", input="hi").output_text == "one two"
        assert chat.completions.create(model="policy", prompt="hi").choices[0].text == "one two"
        claude = anthropic.Anthropic(max_retries=0).messages.create(
            model="policy", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        )
        assert getattr(claude.content[0], "text", None) == "one two"
        assert genai.Client().models.generate_content(model="policy", contents="hi").text == "one two"
        with pytest.raises(openai.BadRequestError, match="'n'"):
            chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], n=2)
        # The other session by its key alone.
        key = exported(second)["OPENAI_API_KEY"]
        url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
        assert httpx.post(
            url, json={"messages": [{"role": "user", "content": "hi"}]}, headers={"authorization": f"Bearer {key}"}
        ).is_success
        command.until("the last line", lambda: "second call 1 · " in command.text and "first refused: field" in command.text)
        line = r"^\d\d:\d\d:\d\d first call (\d) · (\w+)( streamed)? · .* · finished.* \(answer\) · .* · one two<\|end\|>$"
        told = re.findall(line, command.text, re.MULTILINE)
        dialects = [("chat", ""), ("chat", " streamed"), ("responses", ""), ("completions", ""), ("messages", ""), ("gemini", "")]
        assert told == [(str(number), *what) for number, what in enumerate(dialects, start=1)], command.text
        command.interrupt()
        assert command.wait() == 0 and "Traceback" not in command.text, command.text
        assert command.left() == []
        recorded = re.findall(r"^recorded: forge-ray (replay \w+ --run \S+)$", command.text, re.MULTILINE)
    assert len(recorded) == 2
    for line, calls in zip(recorded, (6, 1), strict=True):
        replay = [sys.executable, "-m", "forge_ray.cli.main", *line.split()]
        done = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and f"\n{calls} call" in done.stdout and "'<|end|>'" in done.stdout, done.stdout + done.stderr
