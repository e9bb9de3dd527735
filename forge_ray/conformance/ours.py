"""Our own proxy under test: deployed as in a run, with the scripted engine in its replica, and read from its call log.

The script's words are the policy's tokens here, so the recording is checked token by token. Faults happen in front of the proxy: a request
that is refused there never reaches it, a stream that is cut is one whose client went away.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_ray.config import Config
from forge_ray.conformance import suite, toy_model
from forge_ray.conformance.bench import Address, script_of
from forge_ray.conformance.plan import Plan
from forge_ray.conformance.recording import RecordedCall
from forge_ray.errors import UserError
from forge_ray.job import cluster
from forge_ray.run_dir import RunDir, write_json
from forge_ray.serve_proxy.sessions import Sessions


class CallLog:
    """Reader of our call log."""

    turn_mark = toy_model.ASSISTANT

    def __init__(self, run: RunDir, model: Path) -> None:
        from transformers import AutoTokenizer

        self.run = run
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    async def calls(self, session: str) -> list[RecordedCall]:
        return await asyncio.to_thread(self._calls, session)

    def _calls(self, session: str) -> list[RecordedCall]:
        from forge_ray.trajectories.call_log import CallLogReader

        reader = CallLogReader(self.run.calls)
        reader.refresh()
        return [
            RecordedCall(
                id=call.id,
                prompt=call.prompt_ids,
                sampled=call.ids,
                prompt_text=self.tokenizer.decode(call.prompt_ids),
                counted=call.trainable,
                dialect=call.dialect,
                kind=call.kind,
                conversation=call.conversation,
                spawned_by=call.spawned_by,
                continuation=call.splice,
                continues=call.parent,
                reason=call.reason,
            )
            for call in reader.session(session)
        ]

    def sampled(self, say: str) -> list[int]:
        return [*self.tokenizer.encode(say, add_special_tokens=False), self.tokenizer.eos_token_id]


class Ours:
    """The bench of our proxy. Ray is connected, the proxy deployed."""

    faults_in_front = True

    def __init__(self, plans: Sequence[Plan], client: Any, run: RunDir, model: Path, sessions: Sessions) -> None:
        self.script = script_of(list(plans))
        self.reader = CallLog(run, model)
        self.client, self._sessions = client, sessions

    async def address(self, session: str) -> Address:
        token = self._sessions.issue(session, "train")
        return Address(self.client.base_url, f"/s/{token}", token, "policy")

    async def settle(self, session: str) -> None:
        await self.client.close_session(session)

    def said(self, plan: Plan) -> None:
        return None


def configure(plans: Sequence[Plan], directory: Path, port: int) -> Config:
    """The config of a proxy with the plans' script, whose model is made in `directory`."""
    model = toy_model.make(directory / "model")
    script = directory / "script.json"
    script.write_text(json.dumps([rule for plan in plans for rule in plan.rules]))
    return Config.model_validate(
        {
            "name": "conformance",
            "policy": {
                "model": str(model),
                "script": str(script),
                "engine": {"max_model_len": toy_model.WINDOW, "dtype": "float32"},
                "server": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
            },
            "proxy": {"port": port},
            "harnesses": [{"name": "react"}],
            "tasks": {"train": "none"},
            "eval": {"before": False, "after": False},
            "ray": {"address": "local", "num_cpus": 4},
        }
    )


@contextmanager
def serve(plans: Sequence[Plan], config: Config, directory: Path) -> Iterator[Ours]:
    """Deploy the proxy on the connected Ray, with a run directory in `directory`; removed afterwards."""
    from forge_ray.serve_proxy import deployment

    run = RunDir(directory / "run").create()
    secret = secrets.token_hex(32)
    write_json(run.state, {"incarnation": 1, "secret": secret}, mode=0o600)
    model = config.policy.model.path
    client = deployment.start(config, run, model, 1)
    try:
        yield Ours(plans, client, run, Path(model), Sessions(bytes.fromhex(secret)))
    finally:
        deployment.stop(client.app)


def run(plans: Sequence[Plan], directory: Path, jobs: int, tell: Callable[[suite.Result], None] | None, port: int) -> list[suite.Result]:
    """Run the plans on a Ray cluster of this process's own. Raises `UserError` for a port in use."""
    config = configure(plans, directory / "proxy", port)
    cluster.connect(config)
    import ray

    async def everything() -> list[suite.Result]:
        # The app is stopped while the loop lives: Serve's handles are bound to it.
        with serve(plans, config, directory / "proxy") as bench:
            return await suite.run_all(plans, bench, directory, jobs, tell)

    try:
        return asyncio.run(everything())
    except UserError as error:
        raise UserError(error.problem, where="--port", fix="choose another") if error.where == "proxy.port" else error from None
    finally:
        ray.shutdown()
