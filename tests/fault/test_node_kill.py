"""SIGKILL of all that Ray runs on the node: whatever a client saw the end of is in the log, and the next start goes on from there."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from forge_ray.trajectories.call_log import CallLogReader
from tests.fault.serving import Serving

pytestmark = pytest.mark.timeout(600)
PORT = int(os.environ.get("FORGE_RAY_TEST_PORT", "18710")) + 6
RULES = [{"say": "one two three four five six seven eight", "delay_s": 0.02}]


async def _client(serving: Serving, number: int, seen: dict[str, tuple[str, bool]]) -> None:
    """Asks until the node is gone; notes what came of every session and whether it came to its end."""
    async with httpx.AsyncClient(timeout=60) as http:
        for turn in itertools.count():
            session, stream = f"client{number}-turn{turn}.0", turn % 2 == 0
            body = {"model": "policy", "stream": stream, "messages": [{"role": "user", "content": f"hello {session}"}]}
            seen[session] = ("", False)
            try:
                async with http.stream("POST", serving.url(session) + "/v1/chat/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        text, _ = seen[session]
                        if line == "data: [DONE]":
                            seen[session] = (text, True)
                        elif stream and line.startswith("data: "):
                            seen[session] = (text + (json.loads(line[6:])["choices"][0]["delta"].get("content") or ""), False)
                        elif not stream and line:
                            seen[session] = (json.loads(line)["choices"][0]["message"]["content"], True)
            except (httpx.TransportError, ValueError, KeyError):
                return


async def test_what_a_client_saw_is_in_the_log(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tests.tiny_model import tiny_model

    seen: dict[str, tuple[str, bool]] = {}
    with Serving(tmp_path, PORT, rules=RULES) as serving:
        clients = [asyncio.create_task(_client(serving, number, seen)) for number in range(6)]
        while sum(done for _, done in seen.values()) < 60:
            assert not all(client.done() for client in clients)
            await asyncio.sleep(0.01)
        parts = [psutil.Process(serving.process.pid), *serving.parts()]
        names = {process.name() for process in parts}
        assert {"raylet", "gcs_server"} <= names, names
        for process in parts:  # in one go, the parents first, so that nothing is restarted
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        await asyncio.gather(*clients)
        await asyncio.to_thread(psutil.wait_procs, parts, 60)

        reader, tokenizer = CallLogReader(serving.run.calls), AutoTokenizer.from_pretrained(tiny_model())
        reader.refresh()
        assert reader.verify() == []
        finished = {session: text for session, (text, done) in seen.items() if done}
        assert len(finished) >= 60
        for session, text in finished.items():
            (call,) = reader.session(session)
            assert call.status == "finished" and len(call.ids) == len(call.logprobs)
            assert tokenizer.decode(call.ids, skip_special_tokens=True) == text == RULES[0]["say"]
        statuses = {call.status for session in seen for call in reader.session(session)}
        assert "open" in statuses, "some were under way"
        closing = next(iter(finished))
        under_way = next(s for s in seen if any(call.status == "open" for call in reader.session(s)))

    with Serving(tmp_path, PORT + 1, rules=RULES, again=True) as serving:
        # Its name still finds it: the new cluster's replica reads what the dead one recorded when it meets the session.
        assert (await serving.chat(closing, [{"role": "user", "content": f"hello {closing}"}])).status_code == 200
        before, after = serving.calls(closing)
        assert before.replica != after.replica and serving.do("close", closing)["calls"] == 2
        summary = serving.do("close", under_way)
        assert (summary["failed"], summary["calls"]) == (1, 0)
