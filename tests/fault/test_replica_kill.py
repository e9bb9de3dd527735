"""Replicas that cannot start, and one that is killed: bad input is one line; a successor serves the current weights under their label and
knows every session; no engine stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from forge_ray.run_dir import write_json
from tests.integration.conftest import Served, make_config, make_run, start_ray
from tests.reference import Reference

pytestmark = pytest.mark.asyncio
PORT = int(os.environ.get("FORGE_RAY_TEST_PORT", "18710"))
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One for both tests; the first must meet it before Serve runs."""
    import ray

    start_ray()
    yield
    ray.shutdown()


async def _chat(url: str, **body: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=300) as http:
        messages = [{"role": "user", "content": "def main():\n" * 60}]
        return await http.post(url + CHAT, json={"model": "policy", "messages": messages, "max_tokens": 16, **body})


async def test_bad_input_is_one_line(cluster: None, tmp_path: Path) -> None:
    """A port in use, no model, an unknown and a refused engine argument."""
    import socket

    from forge_ray.errors import UserError
    from forge_ray.serve_proxy import deployment

    run = make_run(tmp_path)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        config = make_config("port", taken.getsockname()[1])
        with pytest.raises(UserError, match=r"port \d+ cannot be used"):
            await asyncio.to_thread(deployment.start, config, run, config.policy.model.path, 1)
    with pytest.raises(UserError, match="no model directory"):
        await asyncio.to_thread(deployment.start, make_config("model", PORT), run, str(tmp_path), 1)
    config = make_config("argument", PORT, engine={"max_model_length": 8})
    with pytest.raises(UserError, match=r"policy\.engine\.max_model_length.*did you mean max_model_len\?") as error:
        await asyncio.to_thread(deployment.start, config, run, config.policy.model.path, 1)
    assert "\n" not in str(error.value)


async def test_a_killed_replica_is_replaced_as_it_was(cluster: None, tmp_path: Path) -> None:
    from forge_ray.serve_proxy import deployment
    from forge_ray.serve_proxy.sessions import Sessions

    config = make_config("kill", PORT, proxy={"limits": {"calls": 50}})
    run = make_run(tmp_path)
    client = await asyncio.to_thread(deployment.start, config, run, config.policy.model.path, 1)
    try:
        served = Served(config, run, client, Sessions(bytes.fromhex("ab" * 32)))
        new = Reference(config.policy.model.path).changed(1)
        path = new.save(run.weights / "1.1.safetensors")
        write_json(run.weights / "current.json", {"version": "1.1", "path": str(path)})
        await client.update_weights(None, "1.1")

        open_session, open_url = served.session("open")
        (await _chat(open_url)).raise_for_status()
        closed_session, closed_url = served.session("closed")
        (await _chat(closed_url)).raise_for_status()
        await client.close_session(closed_session)
        (status,) = await client.status()

        lost_session, lost_url = served.session("lost")
        lost = asyncio.create_task(_chat(lost_url, max_tokens=1500, stream=True))
        while not served.calls(lost_session):
            await asyncio.sleep(0.02)
        replica = psutil.Process(status["pid"])
        engines = [child for child in replica.children(recursive=True) if child.memory_info().rss > 200 * 2**20]
        assert engines, "the engine runs in a child of the replica"
        os.kill(replica.pid, signal.SIGKILL)
        await asyncio.wait([lost])
        _, alive = await asyncio.to_thread(psutil.wait_procs, engines, 60)
        assert not alive, "the engine outlives its replica"

        (after,) = await client.status(timeout_s=400)
        assert after["replica"] != status["replica"] and after["version"] == "1.1"
        assert (await client.update_weights(None, "1.1"))["version"] == "1.1"
        (await _chat(open_url)).raise_for_status()
        first, second = served.calls(open_session)
        assert second.replica == after["replica"] and set(second.versions()) == {"1.1"}
        assert new.differences(second) < 1e-4
        assert second.parent == first.id and second.shared == len(second.prompt_ids)
        assert (await _chat(closed_url)).status_code == 403
        assert (await client.close_session(open_session)).calls == 2
        (call,) = served.calls(lost_session)
        summary = await client.close_session(lost_session)
        if call.status == "open":  # else its end was on disk already when the replica died
            assert (summary.failed, summary.calls) == (1, 0)
    finally:
        await asyncio.to_thread(deployment.stop, client.app)
