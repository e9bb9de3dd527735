"""What the log says is what the engine emitted: ids, logprobs, versions, in every dialect, across weight updates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge_ray.run_dir import write_json
from tests.integration.conftest import LONG_TEXT, Served
from tests.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

BOUND = 1e-4
"""Natural-log units, fp32."""

DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 24}),
    "responses": ("/v1/responses", {"input": LONG_TEXT, "max_output_tokens": 24}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 24}),
}


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served.config.policy.model.path)


@pytest.fixture(scope="module")
def weights(served: Served) -> Weights:
    return Weights(served)


class Weights:
    """Publishes versions the way the learner does. One counter for the module: a label never names two sets of weights."""

    def __init__(self, served: Served) -> None:
        self.served, self.step, self.current = served, 0, Reference(served.config.policy.model.path)

    def prepare(self) -> tuple[str, Reference]:
        """The next version, saved but not published."""
        self.step += 1
        version, changed = f"1.{self.step}", self.current.changed(self.step)
        changed.save(self.served.run.weights / f"{version}.safetensors")
        return version, changed

    async def publish(self, how: str = "reference", prepared: tuple[str, Reference] | None = None) -> tuple[str, Reference]:
        version, changed = prepared or self.prepare()
        path = self.served.run.weights / f"{version}.safetensors"
        write_json(self.served.run.weights / "current.json", {"version": version, "path": str(path)})
        told = await self.served.client.update_weights(_payload(path, how), version)
        assert told["version"] == version
        self.current = changed
        return version, changed


def _payload(path: Path, how: str) -> Any:
    import numpy
    import ray

    return {"reference": lambda: ray.put(numpy.fromfile(path, dtype=numpy.uint8)), "bytes": path.read_bytes, "current": lambda: None}[how]()


async def _text(response: httpx.Response, dialect: str) -> str:
    """The answer's text as the harness reads it from the body or the stream."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        body = response.json()
        if dialect == "chat":
            return body["choices"][0]["message"]["content"] or ""
        if dialect == "messages":
            return "".join(part.get("text", "") for part in body["content"])
        return "".join(part.get("text", "") for item in body["output"] for part in item.get("content", []))
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    if dialect == "chat":
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    if dialect == "messages":
        return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@pytest.mark.parametrize("purpose", ["train", "eval"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("dialect", list(DIALECTS))
async def test_a_call_is_recorded_as_it_was_sampled(
    served: Served, reference: Reference, weights: Weights, dialect: str, stream: bool, purpose: Any
) -> None:
    path, body = DIALECTS[dialect]
    session, url = served.session(f"{dialect}-{stream}", purpose)
    async with httpx.AsyncClient(timeout=300) as http:
        response = await http.post(url + path, json={"model": "policy", "stream": stream, **body})
    assert response.status_code == 200, response.text
    await served.client.close_session(session)
    (call,) = served.calls(session)

    expected = reference.tokenizer.apply_chat_template([{"role": "user", "content": LONG_TEXT}], add_generation_prompt=True, tokenize=False)
    assert call.prompt_ids == reference.tokenizer.encode(expected, add_special_tokens=False)
    assert len(call.prompt_ids) > 300
    assert (call.dialect, call.streamed, call.purpose) == (dialect, stream, purpose)
    assert call.temperature == {"train": 1.0, "eval": 0.7}[purpose]
    assert 0 < len(call.ids) <= 24 and len(call.logprobs) == len(call.ids)
    sampled = reference.tokenizer.decode(call.ids, skip_special_tokens=True)
    assert (await _text(response, dialect)).strip("\ufffd") in (sampled, sampled.strip("\ufffd"))
    assert call.delivered is True and call.trainable
    assert call.versions() == [call.version_open] * len(call.ids)
    assert weights.current.differences(call) < BOUND


async def test_streamed_and_unary_ids_are_those_that_vllm_gives_the_client(served: Served) -> None:
    """vLLM can hand the ids to the client as well: they are the recorded ones."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "count"}], "max_tokens": 40, "return_token_ids": True}
    session, url = served.session("ids")
    async with httpx.AsyncClient(timeout=300) as http:
        unary = await http.post(url + "/v1/chat/completions", json=body)
        stream = await http.post(url + "/v1/chat/completions", json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    first, second = served.calls(session)
    assert unary.json()["choices"][0]["token_ids"] == first.ids
    assert [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []] == second.ids


@pytest.mark.parametrize("how", ["reference", "bytes", "current"])
async def test_logprobs_follow_a_weight_update(served: Served, weights: Weights, how: str) -> None:
    """Before and after, on a prompt of more than two cached blocks. The old weights must not explain the new call: the test has teeth."""
    path, body = DIALECTS["chat"]
    before_weights = weights.current
    sessions = []
    async with httpx.AsyncClient(timeout=300) as http:
        for purpose in ("train", "eval"):
            session, url = served.session("before", purpose)
            sessions.append((session, url))
            (await http.post(url + path, json={"model": "policy", **body})).raise_for_status()
        version, after_weights = await weights.publish(how=how)
        for _, url in sessions:
            (await http.post(url + path, json={"model": "policy", **body})).raise_for_status()
    for session, _ in sessions:
        old, new = served.calls(session)
        assert before_weights.differences(old) < BOUND
        assert after_weights.differences(new) < BOUND
        assert before_weights.differences(new) > 1e-2
        assert set(new.versions()) == {version} != set(old.versions())
    assert {replica["version"] for replica in await served.client.status()} == {version}


async def test_adapters_are_sent_alone_and_the_replica_serves_what_peft_would_merge(served: Served, weights: Weights) -> None:
    path, body = DIALECTS["chat"]
    before_weights, (version, _) = weights.current, weights.prepare()
    merged = weights.current.adapted(7, file := served.run.weights / f"{version}.safetensors")
    session, url = served.session("adapters")
    async with httpx.AsyncClient(timeout=300) as http:
        await weights.publish(prepared=(version, merged))
        (await http.post(url + path, json={"model": "policy", **body})).raise_for_status()
    (call,) = served.calls(session)
    assert file.stat().st_size < sum(model.stat().st_size for model in weights.current.directory.glob("*.safetensors")) / 2
    assert set(call.versions()) == {version}
    assert merged.differences(call) < 1e-5 and before_weights.differences(call) > 1e-2


async def test_an_update_is_idempotent_by_version(served: Served, weights: Weights) -> None:
    version, _ = await weights.publish()
    again = await served.client.update_weights(b"never read, the version is served already", version)
    assert again["version"] == version


async def test_weights_of_another_model_are_refused_and_the_old_ones_stay(served: Served, weights: Weights, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    version = (await served.client.status())[0]["version"]
    good = weights.current.save(tmp_path / "good.safetensors")
    with safe_open(good, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(Exception, match=r"misses model\.norm\.weight"):
        await served.client.update_weights((tmp_path / "bad.safetensors").read_bytes(), "1.9999")
    path, body = DIALECTS["chat"]
    session, url = served.session("refused-weights")
    async with httpx.AsyncClient(timeout=300) as http:
        (await http.post(url + path, json={"model": "policy", **body})).raise_for_status()
    (call,) = served.calls(session)
    assert set(call.versions()) == {version}
    assert weights.current.differences(call) < BOUND


async def test_a_stream_goes_on_across_an_update_and_says_where(served: Served, weights: Weights) -> None:
    path, _ = DIALECTS["chat"]
    before_weights, before = weights.current, (await served.client.status())[0]["version"]
    session, url = served.session("across")
    body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 1200}
    seen = asyncio.Event()

    async def read() -> int:
        async with httpx.AsyncClient(timeout=300) as http, http.stream("POST", url + path, json=body) as response:
            response.raise_for_status()
            chunks = 0
            async for _line in response.aiter_lines():
                chunks += 1
                if chunks == 20:
                    seen.set()
            return chunks

    # The random model may end a reply early; a stream that was over before the update proves nothing.
    for _ in range(12):
        seen.clear()
        prepared = weights.prepare()
        task = asyncio.create_task(read())
        waiting = asyncio.create_task(seen.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await task
            continue
        version, after_weights = await weights.publish(prepared=prepared)
        await task
        call = served.calls(session)[-1]
        if len(call.spans or ()) == 2:
            break
        before_weights, before = weights.current, version
    else:
        pytest.fail("no reply was long enough to meet an update")
    assert call.spans is not None
    (old, first, switch), (new, again, end) = call.spans
    assert (old, new, first, again, end) == (before, version, 0, switch, len(call.ids))
    assert 0 < switch < end
    assert before_weights.differences(call, 0, switch) < BOUND
    assert after_weights.differences(call, switch) < BOUND
    assert before_weights.differences(call, switch) > 1e-2
    await served.client.close_session(session)  # waits for what is written once the reply is over
    assert served.calls(session)[-1].trainable
