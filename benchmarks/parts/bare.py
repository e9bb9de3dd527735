"""vLLM's app over the scripted engine under uvicorn: no edge, no engine tap, no Ray. `python -m benchmarks.parts.bare SPEC`."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.parts.asgi import bare_app, make_config, scripted
from benchmarks.parts.conversation import Words


async def main() -> None:
    import uvicorn

    spec = json.loads(sys.argv[1])
    words = Words(**json.loads(Path(spec["words"]).read_text()))
    with tempfile.TemporaryDirectory(prefix="forge-ray-bench-") as name:
        app = await bare_app(make_config(Path(name), Path(spec["model"]), scripted(words), spec["port"]))
        gc.collect()
        gc.freeze()  # as vLLM's own server does
        # Clients keep connections over the pauses in which the other servers have their turn.
        options = {"log_level": "warning", "access_log": False, "timeout_keep_alive": 600}
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=spec["port"], **options))
        serving = asyncio.create_task(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.05)
        print("{}", flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the benchmark closes it
        server.should_exit = True
        await serving


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
