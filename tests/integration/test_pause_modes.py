"""What a weight update does to the calls that run: `wait` lets them end, `abort` ends them. (`keep`: test_token_fidelity.)

The weights are those that are served already, so that later tests find the policy that they expect.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Served
from tests.tiny_model import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")
BODY = {"model": "policy", "messages": [{"role": "user", "content": "go on for long"}], "max_tokens": 1500}
RUNNING = 4


class Update:
    """Requests of one session that run while the weights are updated; they begin alike and end at random, so there are several."""

    def __init__(self, served: Served, http: httpx.AsyncClient, name: str) -> None:
        self.served, self._http = served, http
        self.session, self._url = served.session(name)

    async def ask(self, number: int) -> int:
        """The status of one answer; 0 for a stream that was cut, or that ends with an error."""
        try:
            body = {**BODY, "stream": number % 2 == 1}
            answer = await self._http.post(f"{self._url}/v1/chat/completions", json=body)
        except httpx.TransportError:
            return 0
        whole = "[DONE]" in answer.text and '{"error"' not in answer.text
        return answer.status_code if not body["stream"] or whole else 0

    async def run(self, version: str, pause: Any) -> tuple[list[int], list[Any]]:
        """Statuses of the answers and the calls of the log, by their start."""
        asked = [asyncio.create_task(self.ask(number)) for number in range(RUNNING)]
        while (await self.served.client.status())[0]["live"] < RUNNING and not any(task.done() for task in asked):
            await asyncio.sleep(0.01)
        path = next(Path(tiny_model()).glob("*.safetensors"))
        await self.served.client.update_weights(str(path), version, pause=pause)
        return [await task for task in asked], self.served.calls(self.session)


async def test_wait_lets_running_calls_end_under_the_old_weights(served: Served) -> None:
    before = (await served.client.status())[0]["version"]
    async with httpx.AsyncClient(timeout=300) as http:
        update = Update(served, http, "wait")
        statuses, calls = await update.run("0.901", "wait")
        assert statuses == [200] * RUNNING
        assert all(call.status in ("finished", "length") for call in calls)
        # One that the engine had not begun waits itself, and has the new weights only.
        assert {frozenset(call.versions()) for call in calls} <= {frozenset({before}), frozenset({"0.901"})}
        assert any(set(call.versions()) == {before} for call in calls)
        assert await update.ask(0) == 200
    assert set(served.calls(update.session)[-1].versions()) == {"0.901"}


async def test_abort_ends_running_calls_and_the_harness_asks_again(served: Served) -> None:
    async with httpx.AsyncClient(timeout=300) as http:
        update = Update(served, http, "abort")
        for attempt in range(8):
            version = f"0.{910 + attempt}"
            statuses, calls = await update.run(version, "abort")
            ended = [call for call in calls if call.status == "cancelled"]
            if ended:
                break
        else:
            pytest.fail("every reply ended by itself before the update")
        assert statuses.count(200) + statuses.count(500) + statuses.count(0) == RUNNING
        assert RUNNING - statuses.count(200) == len(ended), "only what was ended is an error, and it always is"
        assert not any(call.trainable for call in ended)
        assert await update.ask(0) == 200
        summary = await served.client.close_session(update.session)
    assert summary.failed == 0 and set(served.calls(update.session)[-1].versions()) == {version}
