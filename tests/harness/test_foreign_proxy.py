"""The conformance suite on a proxy that is not ours: the reader of docs/conformance.md finds in its log what a real program did, or not."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from forge_ray.conformance import suite
from forge_ray.conformance.bench import Foreign
from forge_ray.conformance.cases import CASES
from forge_ray.conformance.programs import PROGRAMS
from tests.harness.installed import require

pytestmark = pytest.mark.timeout(600)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
PROGRAM = "mini_swe_agent"


class LoggingProxy:
    """Passes unstreamed chat calls on to `upstream` and logs each as a line, or, with `forgets`, all but the second."""

    upstream = ""

    def __init__(self, log: Path, forgets: bool) -> None:
        self._log, self._forgets, self._seen = log, forgets, 0

    async def start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.Response:
        body = await request.read()
        async with aiohttp.ClientSession() as http, http.request(request.method, self.upstream + request.path, data=body) as answer:
            status, text = answer.status, await answer.text()
        if request.path.endswith("/chat/completions"):
            self._seen += 1
            reply = json.loads(text)["choices"][0]["message"] if status == 200 else None
            line = {"id": uuid.uuid4().hex, "key": request.headers["authorization"], "request": json.loads(body), "status": status}
            if not (self._forgets and self._seen == 2):
                with self._log.open("a") as file:
                    file.write(json.dumps(line | {"reply": reply}) + "\n")
        return web.Response(status=status, text=text, content_type="application/json")


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_reader_of_another_proxys_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool) -> None:
    require(PROGRAM)
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    monkeypatch.chdir(tmp_path)  # where its log lies
    plan = CASES["words"](PROGRAMS[PROGRAM])
    assert plan is not None
    proxy = LoggingProxy(tmp_path / "calls.jsonl", forgets)
    url, key = await proxy.start(), "conformance-{session}"
    bench = await Foreign([plan], url=url, key=key, model="policy", port=0, reader=names["Log"](), settle_s=0).start()
    proxy.upstream = bench.door.url
    try:
        result = await suite.run_one(plan, bench, tmp_path / "run")
    finally:
        await proxy.stop()
        await bench.stop()
    assert result.checked == ["workspace", "script", "recording"]
    missing = ["recording: main.1 is missing"] if forgets else []
    assert [str(problem) for problem in result.problems] == missing, result.log[-2000:]
