"""Small parts of the proxy: command lines, scripts, weight files, lifelines, disconnects."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir, write_json
from forge_ray.sandboxes import processes
from forge_ray.serve_proxy import weights
from forge_ray.serve_proxy.arguments import command_line
from forge_ray.serve_proxy.disconnects import Disconnects
from forge_ray.serve_proxy.scripted_engine import Script, load_script

KNOWN = ["model", "max_model_len", "enforce_eager", "override_generation_config", "middleware", "seed"]


def test_command_line() -> None:
    given = {
        "policy.engine": {
            "max-model-len": 8,
            "enforce_eager": False,
            "override_generation_config": {"a": 1},
            "middleware": ["x", "y"],
            "seed": None,
        }
    }
    line = command_line(KNOWN, {"model": "m"}, {"enforce_eager": True}, given)
    assert line == [
        "--no-enforce-eager",
        "--max-model-len=8",
        "--override-generation-config",
        '{"a": 1}',
        "--middleware",
        "x",
        "y",
        "--model=m",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_length": 8}, "did you mean max_model_len?"),
        ({"model": "other"}, "is set by the proxy itself"),
        ({"sed": 1}, "did you mean seed?"),
    ],
)
def test_unknown_and_reserved_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        command_line(KNOWN, {"model": "m"}, {}, {"policy.engine": given})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_first_rule_that_fits_answers(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text(json.dumps([{"if": "a", "turn": 1, "say": "one"}, {"if": "a", "ids": [1]}, {"turn": 7, "fault": "hang"}]))
    script = Script(load_script(file))
    assert script.answer("cat#reply#", "#").say == "one"
    assert script.answer("cat#", "#").ids == [1]
    assert script.answer("dog#", "#").say == "done."
    assert script.answer("dog" + "#" * 8, "#").fault == "hang"


def test_a_script_tells_conversations_apart(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    rules = [
        {"of": "A1", "turn": 0, "say": "spawn A12"},
        {"of": "A12", "turn": 0, "say": "sub"},
        {"of": "A1", "last": "summarise", "say": "short"},
        {"of": "A1", "turn": 1, "find": "id=(\\w+)", "say": "wait {found}"},
    ]
    file.write_text(json.dumps(rules))
    script = Script(load_script(file))
    assert script.answer("task A1 #", "#").say == "spawn A12"
    assert script.answer("task A12 #", "#").say == "sub"  # a mark that another one begins with
    assert script.answer("task A1 #spawn A12 started id=x id=y9 #", "#").say == "wait y9"
    assert script.answer("task A1 #spawn A12 started id=x now summarise #", "#").say == "short"
    assert script.answer("task summarise A1 #spawn A12 started id=x #", "#").say == "wait x"
    assert script.answer("nobody's #", "#").say == "done."


def test_faults_of_a_script_act_as_often_as_it_says(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    rules = [{"if": "a", "fault": "fail", "times": 2, "say": "at last"}, {"fault": "overflow", "times": 1, "say": "fits"}]
    file.write_text(json.dumps(rules))
    script = Script(load_script(file))
    assert [script.answer("a#", "#").fault for _ in range(3)] == ["fail", "fail", None]
    assert [script.overflows("b#", "#") for _ in range(2)] == [True, False]
    assert script.answer("b#", "#").say == "fits" and not script.overflows("a#", "#")


@pytest.mark.parametrize("text", ["no json", "[{}]", '[{"say": "x", "ids": [1]}]', '[{"sya": "x"}]', '{"say": "x"}'])
def test_a_bad_script_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "script.json"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load_script(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def _weights(**changes: Any) -> dict[str, np.ndarray]:
    tensors = {"embed.weight": np.zeros((4, 2), dtype=np.float32), "norm.weight": np.ones(2, dtype=np.float32)}
    return {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}


def test_weights_are_checked_against_the_checkpoint(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file(_weights(**{"lm_head.weight": np.zeros((4, 2), dtype=np.float32)}), model / "model.safetensors")
    expected = weights.checkpoint(model)

    def check(tied: bool = True, **changes: Any) -> None:
        save_file(_weights(**changes), tmp_path / "new.safetensors")
        weights.check(weights.WeightFiles(str(tmp_path / "new.safetensors")), expected, tied=tied)

    check()
    for problem, tied, changes in (
        ("misses lm_head.weight", False, {}),
        ("misses norm.weight", True, {"norm.weight": None}),
        (r"brings module\.x", True, {"module.x": np.zeros(1, dtype=np.float32)}),
        (r"has shape \[3\]", True, {"norm.weight": np.ones(3, dtype=np.float32)}),
    ):
        with pytest.raises(weights.WeightMismatch, match=problem):
            check(tied, **changes)
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "new.safetensors").read_bytes()[:20])
    with pytest.raises(weights.WeightMismatch, match="no safetensors file"):
        weights.check(weights.WeightFiles(str(tmp_path / "torn.safetensors")), expected, tied=True)


def test_adapters_are_checked_against_the_checkpoint_and_find_their_base(tmp_path: Path) -> None:
    run, model, told = RunDir(tmp_path / "run").create(training=False), tmp_path / "model", {"lora": "1", "scale:proj": "2.0"}
    model.mkdir()
    save_file({"proj.weight": np.zeros((4, 3), dtype=np.float32)}, model / "model.safetensors")
    expected = weights.checkpoint(model)

    def check(told: dict[str, str], **shapes: tuple[int, int]) -> weights.WeightFiles:
        named = {f"{name[:-2]}.lora_{name[-1]}": np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
        save_file(named, tmp_path / "new.safetensors", metadata=told)
        found = weights.files(str(tmp_path / "new.safetensors"), run, str(model))
        weights.check(found, expected, tied=True)
        return found

    assert check(told, proj_A=(2, 3), proj_B=(4, 2)).base == (str(model / "model.safetensors"),)
    for problem, text, shapes in (
        (r"proj.lora_A .* does not fit", told, {"proj_A": (2, 3)}),
        (r"does not fit proj.weight of shape \[4, 3\]", told, {"proj_A": (2, 4), "proj_B": (4, 2)}),
        (r"does not fit", told, {"proj_A": (2, 3), "proj_B": (4, 1)}),
        (r"has no other.weight", told, {"other_A": (2, 3), "other_B": (4, 2)}),
        (r"the file no scale", {"lora": "1"}, {"proj_A": (2, 3), "proj_B": (4, 2)}),
        (r"base of the adapters is not there", told | {"base": "gone"}, {"proj_A": (2, 3), "proj_B": (4, 2)}),
    ):
        with pytest.raises(weights.WeightMismatch, match=problem):
            check(text, **shapes)
    (run.weights / ".base.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert check(told | {"base": ".base.safetensors"}, proj_A=(2, 3), proj_B=(4, 2)).base == (str(run.weights / ".base.safetensors"),)


def test_a_payload_becomes_a_file_for_as_long_as_it_is_needed(tmp_path: Path) -> None:
    data = save(_weights())
    for payload in (data, memoryview(data), np.frombuffer(data, dtype=np.uint8)):
        with weights.as_file(payload) as path:
            assert Path(path).read_bytes() == data
        assert not Path(path).exists()
    file = tmp_path / "given.safetensors"
    file.write_bytes(data)
    with weights.as_file(str(file)) as path:
        assert path == str(file)
    assert file.exists()


def test_current_weights(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert weights.current(run) is None
    write_json(run.weights / "current.json", {"version": "2.3", "path": "/w"})
    assert weights.current(run) == ("2.3", "/w")
    (run.weights / "2.3.safetensors").write_bytes(b"")
    for named in ("2.3.safetensors", "/where/the/run/was/weights/2.3.safetensors"):
        write_json(run.weights / "current.json", {"version": "2.3", "path": named})
        assert weights.current(run) == ("2.3", str(run.weights / "2.3.safetensors"))


def test_a_process_ends_with_the_one_it_follows(tmp_path: Path) -> None:
    """The owner is killed outright and cannot tell anybody."""
    file = tmp_path / "pid"
    child = (
        "import os, time; from forge_ray.serve_proxy import lifeline; assert lifeline.follow(); "
        f"open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    owner = (
        "import subprocess, sys; from forge_ray.serve_proxy import lifeline; lifeline.hold(); "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", owner]) as process:
        deadline = time.monotonic() + 120
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        pid = int(file.read_text())
        process.kill()
    while processes.state(pid) not in (None, "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_a_cancelled_request_is_a_disconnect_for_the_app() -> None:
    ended: list[str] = []
    listens = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        work = asyncio.create_task(asyncio.sleep(600))
        assert scope["asgi"]["spec_version"] == "2.3"
        assert (await receive())["type"] == "http.request"
        ended.append((await receive())["type"])
        work.cancel()
        await send({"type": "http.response.start", "status": 500})

    sent: list[Any] = []
    messages = [{"type": "http.request"}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        listens.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    task = asyncio.create_task(Disconnects(app)({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send))
    await listens.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["http.disconnect"] and sent == []


async def test_an_app_that_ignores_the_disconnect_is_cancelled() -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            entered.set()
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        return None

    task = asyncio.create_task(Disconnects(app, grace_s=0.05)({"type": "http"}, receive, send))
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    await asyncio.wait_for(cancelled.wait(), 30)
