"""A teacher behind the proxy: a real rollout talks to it, is recorded as text, and becomes demonstrations in the policy's own tokens."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import uvicorn
import yaml

from forge_ray.actors.attempt import Bench, attempt
from forge_ray.config import Config, Sft, Source
from forge_ray.harnesses.react_program import TOOL
from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRequest
from forge_ray.run_dir import RunDir
from forge_ray.sandboxes.process import ProcessBackend
from forge_ray.serve_proxy.client import SessionSummary, merge
from forge_ray.serve_proxy.scripted_engine import logprob
from forge_ray.serve_proxy.sessions import Sessions
from forge_ray.trajectories.call_log import CallLogReader
from tests.integration.scripted import SECRET, Scripted, scripted
from tests.task_maker import make_task
from tests.tiny_model import TEMPLATE, tiny_model

WORDS = 'Grüße, "two"\n\tlines \\o/'
PYTHON_TEMPLATE = TEMPLATE.replace("assistant\n", "pupil\n").replace("function.arguments | tojson", "function.arguments | tojson(indent=1)")
"""The policy's own: another name for the one who answers, and arguments over several lines."""
RULES = [
    {"turn": 0, "say": 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat in.txt"}}\n</tool_call>'},
    {"turn": 1, "say": '<tool_call>\n{"name":"bash","arguments":{"command":"cp in.txt out.txt"}}\n</tool_call>'},
    {"turn": 2, "say": "It is copied."},
]
CHECK = "#!/bin/sh\nif cmp -s in.txt out.txt; then echo 1; else echo 0; fi > ${VERIFIER_DIR:-/logs/verifier}/reward.txt\n"


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


class Here:
    """A proxy of this process, for a pool: what `ProxyClient` is for one on Ray Serve."""

    def __init__(self, proxy: Scripted, url: str) -> None:
        self._proxy, self._url = proxy, url

    def url(self, token: str) -> str:
        return f"{self._url}/s/{token}"

    async def status(self) -> list[dict[str, Any]]:
        return [{"window": self._proxy.recorder.engine_window}]

    async def close_session(self, session: str, timeout_s: float) -> SessionSummary:
        self._proxy.index.close(session)
        self._proxy.edge.abort(session)
        await self._proxy.edge.drained(session, timeout_s)
        return merge(session, [{"replica": "replica", **self._proxy.index.state(session).report()}])


async def record(folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> RunDir:
    """One rollout of react that asks the teacher, and one that does nothing right."""
    task = make_task(
        folder / "copy",
        instruction="Copy in.txt to out.txt.",
        environment={"in.txt": WORDS},
        dockerfile="FROM debian:bookworm-slim\nWORKDIR /workspace\nCOPY in.txt .\n",
        test=CHECK,
    )
    lazy = make_task(folder / "lazy", instruction="Do nothing.", test=CHECK)
    (folder / "teacher").mkdir()
    (folder / "pupil").mkdir()
    (folder / "template.jinja").write_text(PYTHON_TEMPLATE)
    monkeypatch.setenv("TEACHER_KEY", Sessions(SECRET).issue("of-the-teacher", "train"))
    rules = [{"if": "Do nothing.", "say": "Nothing."}, *RULES]
    async with scripted(folder / "teacher", rules) as teacher, listening(teacher.app) as there:
        upstreams = {"teach*": {"url": f"{there}/v1", "key_env": "TEACHER_KEY", "top_logprobs": 1}}
        pupil = scripted(
            folder / "pupil",
            [{"say": "I am the policy."}],
            proxy={"upstreams": upstreams},
            chat_template=str(folder / "template.jinja"),
        )
        async with pupil as proxy, listening(proxy.app) as url:
            harness = {"name": "react", "model": "teacher", "options": {"stream": stream}}
            config = Config.model_validate({**proxy.config.model_dump(), "harnesses": [harness], "runs": str(folder)})
            proxy.run.config.write_text(yaml.safe_dump(config.model_dump(mode="json")))
            backend = ProcessBackend(config.sandbox.model_copy(update={"directory": str(folder / "sandboxes")}), "run")
            here: Any = Here(proxy, url)
            bench = Bench(config, proxy.run, backend, here, Sessions(SECRET))
            for key, path in (("good", task), ("bad", lazy)):
                (proxy.run.rollouts / f"{key}.0").mkdir(parents=True)
                request = RolloutRequest(key=key, purpose="eval", task=str(path), task_name=key, harness="react")
                done = await attempt(request, 0, bench)
                assert (done.outcome, done.calls) == (Outcome.OK, 0), done
                assert (done.reward, done.upstream_calls) == ((1.0, 3) if key == "good" else (0.0, 1))
            assert proxy.recorder.calls == 0
        sampled = teacher.calls("of-the-teacher")
        assert len(sampled) == 4
        (folder / "tokens.json").write_text(
            json.dumps([[teacher.engine.tokenizer.decode([token]) for token in call.ids[:-1]] for call in sampled])
        )
    return proxy.run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_a_teachers_rollout_becomes_demonstrations_and_an_sft_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    recorded = await record(tmp_path, monkeypatch, stream)
    reader = CallLogReader(recorded.calls)
    reader.refresh()
    calls = reader.upstream("good.0")
    assert reader.session("good.0") == [] and [call.reply["finish_reason"] for call in calls] == ["tool_calls", "tool_calls", "stop"]
    assert all(call.whole and call.streamed is stream for call in calls)
    said = json.loads((tmp_path / "tokens.json").read_text())
    assert calls[2].logprobs is not None and calls[2].logprobs["tokens"][: len(said[2])] == said[2]
    # In the policy's template, through the source of a run's config, as `forge-ray train` makes it.
    from forge_ray.job.sources import resolve

    run = RunDir(tmp_path / "training").create()
    run.config.write_text(recorded.config.read_text())
    if stream:  # its second half needs only one of them
        return
    source = Source(path="builtin:teacher", options={"recordings": str(recorded.root)})
    made = await resolve(source, "train.sft.demonstrations", "demonstrations", run, 0)
    table = pq.read_table(made / "demonstrations.parquet")
    (row,) = table.to_pylist()
    assert (row["session"], row["task"], row["reward"], len(row["turns"])) == ("good.0", "good", 1.0, 3)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model())
    conversation = [*calls[-1].request["messages"], {"role": "assistant", "content": calls[-1].reply["text"]}]
    for message in conversation:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    whole = tokenizer.apply_chat_template(conversation, tools=[TOOL], tokenize=False, chat_template=PYTHON_TEMPLATE)
    assert tokenizer.decode(row["ids"], skip_special_tokens=False) == whole.removesuffix("\n")
    assert "<|im_start|>pupil" in whole and json.dumps({"command": "cat in.txt"}, indent=1) in whole and WORDS.split("\n")[0] in whole
    spoken = [tokenizer.decode(row["ids"][turn["first"] : turn["end"]], skip_special_tokens=False) for turn in row["turns"]]
    assert spoken == [part.partition("<|im_start|>")[0].rstrip("\n") for part in whole.split("<|im_start|>pupil\n")[1:]]
    trained = {place for turn in row["turns"] for place in range(turn["first"], turn["end"])}
    assert row["mask"] == [place in trained for place in range(len(row["ids"]))]
    last = row["turns"][2]
    assert last["tokens"][: len(said[2])] == said[2] and json.loads(last["text"])["text"] == "It is copied."
    first_id = tokenizer.encode(said[2][0], add_special_tokens=False)[0]
    assert last["logprobs"][0] == pytest.approx(logprob(0, first_id)) and json.loads(last["more"])["top"][0] != {}
    _sft_step(table)


def _sft_step(table: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from forge_ray.train_loop import forward, sft
    from forge_ray.train_loop.part import Passes
    from forge_ray.train_loop.ranks import Ranks
    from forge_ray.train_loop.strategies.ddp import Replicated

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    losses: list[float] = []
    recipe, device = Sft(demonstrations=Source(path="x"), steps=3, batch_size=1, warmup_steps=0), torch.device("cpu")
    strategy = Replicated(model, recipe.optimizer, Ranks(), device)
    rows, passes = forward.demonstration_rows(table), Passes(device, 4096)
    sft.train(strategy, rows, recipe, 0, passes=passes, report=lambda _, loss: losses.append(loss))
    assert losses[-1] < losses[0]
