"""vLLM's app over the scripted engine, bare and recorded, in this process: what both sides of the comparison are made of."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.parts.conversation import Words
from forge_ray import ray_env
from forge_ray.config import Config
from forge_ray.run_dir import RunDir, write_json
from forge_ray.serve_proxy.sessions import Sessions

SECRET = bytes.fromhex("ab" * 32)
WINDOW = 160 * 1024


def make_config(directory: Path, model: Path, rules: list[dict[str, Any]], port: int) -> Config:
    """The config of a proxy that answers by `rules`; the script lies in `directory`."""
    script = directory / "script.json"
    script.write_text(json.dumps(rules))
    engine = {"max_model_len": WINDOW, "dtype": "float32", "hf_overrides": {"max_position_embeddings": WINDOW}}
    return Config.model_validate(
        {
            "name": "bench",
            "policy": {"model": str(model), "script": str(script), "engine": engine, "server": {"tool_call_parser": "hermes"}},
            "proxy": {"port": port},
            "harnesses": [{"name": "react"}],
            "tasks": {"train": "tasks"},
            "eval": {"before": False, "after": False},
        }
    )


def scripted(words: Words) -> list[dict[str, Any]]:
    """Every call gets the same reply."""
    return [{"say": words.reply}]


def make_run(root: Path) -> RunDir:
    """An empty run directory."""
    run = RunDir(root).create()
    write_json(run.state, {"incarnation": 1, "secret": SECRET.hex()}, mode=0o600)
    return run


def token(session: str) -> str:
    """The session's key."""
    return Sessions(SECRET).issue(session, "train")


async def bare_app(config: Config) -> Any:
    """vLLM's app with neither edge nor engine tap."""
    os.environ.update(ray_env.worker())
    from vllm.engine.arg_utils import AsyncEngineArgs

    from forge_ray.serve_proxy import vllm_internals
    from forge_ray.serve_proxy.scripted_engine import load_script
    from forge_ray.serve_proxy.vllm_internals.scripted_client import ScriptedClient

    args = vllm_internals.parse_arguments(config, config.policy.model.path)
    client: Any = ScriptedClient
    engine = client(AsyncEngineArgs.from_cli_args(args).create_engine_config(), load_script(str(config.policy.script)), None)
    engine.recorder = SimpleNamespace(version="1.0", index=SimpleNamespace(reader=None))
    return await vllm_internals.make_app(engine, args)


@asynccontextmanager
async def recorded_app(config: Config, run: RunDir) -> AsyncIterator[Any]:
    """What a replica serves: the same app behind edge and engine tap, with a call log on disk."""
    os.environ.update(ray_env.worker())
    from forge_ray.serve_proxy import vllm_internals
    from forge_ray.serve_proxy.admission import Admission
    from forge_ray.serve_proxy.disconnects import Disconnects
    from forge_ray.serve_proxy.edge import Edge, EdgeSettings
    from forge_ray.serve_proxy.recording import Recorder
    from forge_ray.serve_proxy.recovery import Recovery
    from forge_ray.serve_proxy.session_index import SessionIndex
    from forge_ray.trajectories.call_log import CallLogWriter

    args = vllm_internals.parse_arguments(config, config.policy.model.path)
    engine = vllm_internals.make_engine(config, args)
    index, log = SessionIndex("bench", config.proxy.limits), CallLogWriter(run.calls / "bench.jsonl")
    recorder = engine.recorder = Recorder(
        log=log, index=index, proxy=config.proxy, window=WINDOW, version="1.0", refusals=vllm_internals.REFUSALS
    )
    admission = recorder.admission = Admission.of(config.proxy, engine.vllm_config.scheduler_config.max_num_seqs)
    app = await vllm_internals.make_app(engine, args)
    settings = EdgeSettings.of(config, index.window(WINDOW), run.bodies)
    recovery = Recovery(index, run.calls, alone=True)
    edge = Edge(app, settings=settings, sessions=Sessions(SECRET), index=index, log=log, admission=admission, recovery=recovery)
    try:
        yield Disconnects(edge)
    finally:
        log.close()
        engine.shutdown(timeout=1.0)
