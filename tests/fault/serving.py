"""The proxy in a process and a Ray cluster of its own: `python -m tests.fault.serving RUN PORT CONFIG` (the config of `make_config`, JSON).

It says `ready` and then does what each line of its input says (JSON: [command, arguments …]), one answer a line. Used as `Serving`, from a
test that itself has nothing to do with Ray, so that everything of the cluster can be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import psutil

from forge_ray.run_dir import RunDir
from forge_ray.serve_proxy.sessions import Sessions
from forge_ray.trajectories.call_log import CallLogReader
from tests.fault.command import ROOT, Watched
from tests.integration.conftest import make_run

SECRET = bytes.fromhex("ab" * 32)


class Serving(Watched):
    """A served proxy; use as a context manager. Requests go straight to its port."""

    def __init__(
        self, directory: Path, port: int, *, rules: list[Any], again: bool = False, environment: dict[str, str] | None = None, **config: Any
    ) -> None:
        """`again`: on the run that is in `directory` already."""
        self.directory = directory
        script = directory / "script.json"
        script.write_text(json.dumps(rules))
        self.run = RunDir(directory / "run") if again else make_run(directory / "run")
        self.base = f"http://127.0.0.1:{port}"
        words = [str(self.run.root), str(port), json.dumps({"script": str(script), **config})]
        output = directory / "serving.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.fault.serving", *words],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        super().__init__(process, output)
        assert process.stdin is not None
        self._input = process.stdin
        self._answers: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Serving:
        try:
            self.answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        parts = self.seen()
        self._input.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        psutil.wait_procs(parts, timeout=20)
        for process in parts:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def seen(self) -> list[psutil.Process]:
        """Every process of the cluster that was seen so far, those of now and Ray's own daemons among them."""
        self.watch()
        return list(self.parts)

    def ask(self, *command: Any) -> None:
        """Send a command and do not wait for its answer."""
        self._input.write(json.dumps(command) + "\n")
        self._input.flush()

    def answer(self, seconds: float = 400) -> Any:
        """The next answer. An exception there is a RuntimeError here."""
        line = self._answers.get(timeout=seconds)
        assert line, f"the serving process ended:\n{self.text[-6000:]}"
        value = json.loads(line)
        if "error" in value:
            raise RuntimeError(value["error"])
        return value["answer"]

    def do(self, *command: Any) -> Any:
        self.ask(*command)
        return self.answer()

    def token(self, session: str) -> str:
        return Sessions(SECRET).issue(session, "train")

    def url(self, session: str) -> str:
        return f"{self.base}/s/{self.token(session)}"

    async def chat(self, session: str, messages: list[Any], *, key_only: bool = False, **body: Any) -> httpx.Response:
        """One request of a session, by its path or only with its key."""
        url = self.base if key_only else self.url(session)
        async with httpx.AsyncClient(timeout=300) as http:
            headers = {"authorization": f"Bearer {self.token(session)}"}
            request = {"model": "policy", "messages": messages, **body}
            return await http.post(f"{url}/v1/chat/completions", json=request, headers=headers)

    def calls(self, session: str) -> list[Any]:
        return self.reader().session(session)

    def reader(self) -> CallLogReader:
        reader = CallLogReader(self.run.calls)
        reader.refresh()
        return reader

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._answers.put(line)
        self._answers.put("")


def obey(client: Any, config: Any, run: RunDir) -> None:
    """Do what the input says until it ends."""
    from forge_ray.train_loop.weight_sync import make_current

    loop = asyncio.new_event_loop()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer: Any = None
            if command == "status":
                answer = loop.run_until_complete(client.status())
            elif command == "close":
                answer = loop.run_until_complete(client.close_session(*arguments)).model_dump()
            elif command == "update":
                version, seconds = arguments
                answer = loop.run_until_complete(client.update_weights(None, version, timeout_s=seconds))
            elif command == "switch":
                path, version, seconds = arguments
                decide = partial(make_current, run, path, version)
                answer = loop.run_until_complete(client.update_weights(path, version, timeout_s=seconds, decide=decide))
            elif command == "scale":
                _scale(config.name, *arguments)
                client.replicas = arguments[0]
            else:
                raise ValueError(command)
            print(json.dumps({"answer": answer}), flush=True)
        except Exception:
            print(json.dumps({"error": traceback.format_exc()}), flush=True)


def _scale(name: str, replicas: int) -> None:
    """What an autoscaler tells the controller."""
    import ray
    from ray.serve._private.common import DeploymentID

    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    deployment = DeploymentID("policy", f"forge-{name}")
    ray.get(controller.__ray_call__.remote(lambda self: self.deployment_state_manager.set_target_num_replicas(deployment, replicas)))


def main() -> None:
    import ray

    from tests.integration.conftest import make_config, start_ray

    root, port, values = sys.argv[1:]
    start_ray()  # before the first import of Serve, which reads its variables then
    from forge_ray.serve_proxy import deployment

    try:
        config, run = make_config("serving", int(port), **json.loads(values)), RunDir(Path(root))
        client = deployment.start(config, run, config.policy.model.path, 1)
        print(json.dumps({"answer": "ready"}), flush=True)
        obey(client, config, run)
        deployment.stop(client.app)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
