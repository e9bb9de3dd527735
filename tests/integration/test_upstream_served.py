"""Another model behind the deployed proxy: the key reaches the replica and nothing that Ray or the run writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge_ray.trajectories.call_log import CallLogReader
from tests.integration.conftest import UPSTREAM_KEY, UPSTREAM_SESSION, Served

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK: dict[str, Any] = {"model": "teacher", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_the_key_travels_unseen(served: Served, http: httpx.Client, stream: bool) -> None:
    session, url = served.session("asks-another")
    answer = http.post(f"{url}/v1/chat/completions", json=ASK | {"stream": stream})
    assert answer.status_code == 200, answer.text
    summary = await served.client.close_session(session)
    assert (summary.upstream, summary.calls, summary.last_status) == (1, 0, "length") or summary.last_reply in ("answer", "tool_calls")
    reader = CallLogReader(served.run.calls)
    reader.refresh()
    (one,) = reader.upstream(session)
    assert reader.session(session) == [] and one.delivered and one.request == ASK | {"stream": stream}
    answered = [call for call in reader.session(UPSTREAM_SESSION) if call.model == "policy"][-1]
    assert one.logprobs is not None
    # All sampled tokens but an end token, which servers do not show.
    shown = len(one.logprobs["logprobs"])
    assert shown >= len(answered.ids) - 1 and one.logprobs["logprobs"] == pytest.approx(answered.logprobs[:shown], abs=1e-6)
    from ray._private import worker

    key, wrong, node = os.environ[UPSTREAM_KEY].encode(), [], worker._global_node
    assert node is not None
    logs = Path(node.get_session_dir_path()) / "logs"
    written = [file for folder in (logs, served.run.root) for file in folder.rglob("*") if file.is_file()]
    assert any(file.name.startswith("runtime_env_agent") for file in written)
    for file in written:
        if key in file.read_bytes():
            wrong.append(file.name)
    assert wrong == []
