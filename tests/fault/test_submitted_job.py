"""`ray start --head` and submitted jobs, with and without the variables of `cluster/ray.env`: the run lands where it belongs, a job that
is stopped takes its Serve app and its sandboxes with it, and the cluster is left as it was."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_ray.report.metrics import read_metrics
from forge_ray.run_dir import RunDir
from tests.fault.command import MARK, ROOT, Watched, sandboxes, small_run

pytestmark = pytest.mark.timeout(900)
OURS = ("ray::ServeReplica", "ray::RolloutPool", "ray::RayTrainWorker", "ray::Exchange", "ray::TrainController", "VLLM::")


def free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to whoever asks for any: Ray asks for dozens before it takes these."""
    found: list[int] = []
    for port in random.sample(range(24000, 29000), 1000):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            break
    return found


class Head(Watched):
    """`ray start --head --block` with ports and directories of its own; use as a context manager."""

    def __init__(self, directory: Path, *, env_file: bool, ingress: int) -> None:
        self.directory = directory
        # Ray's sockets lie below it: its path must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="frh", dir="/tmp"))
        gcs, self.dashboard, *others = free_ports(5)
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={gcs}", "--num-cpus=2"]
        start += [
            f"--dashboard-port={self.dashboard}",
            "--dashboard-host=127.0.0.1",
            f"--temp-dir={self.temporary}",
            "--disable-usage-stats",
        ]
        start += [f"--dashboard-agent-listen-port={others[0]}", f"--ray-client-server-port={others[1]}"]
        start += [f"--object-store-memory={256 * 2**20}"]
        command = f"exec {shlex.join(start)}"
        if env_file:
            command = f"set -a; . {shlex.quote(str(ROOT / 'cluster' / 'ray.env'))}; set +a; {command}"
        self.mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {MARK: self.mark, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        # Not of ray.env: authentication of Ray itself, and ports beside other clusters on this machine.
        environment |= {"RAY_TMPDIR": str(self.temporary), "RAY_AUTH_MODE": "disabled"}
        for kind, first in (("HTTP", ingress), ("GRPC", ingress + 100)):
            environment |= {f"RAY_SERVE_DIRECT_INGRESS_M{end}_{kind}_PORT": str(first + add) for end, add in (("IN", 0), ("AX", 79))}
        environment |= {"RAY_SERVE_HAPROXY_METRICS_PORT": str(others[2])}
        output = directory / "head.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", command], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        super().__init__(process, output)

    def __enter__(self) -> Head:
        from ray.job_submission import JobSubmissionClient

        def connect() -> JobSubmissionClient | None:
            try:
                client = JobSubmissionClient(f"http://127.0.0.1:{self.dashboard}")
                client.list_jobs()
                return client
            except (ConnectionError, RuntimeError):
                return None

        try:
            self.jobs: Any = self.until("the dashboard", connect)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.watch()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        alive = psutil.wait_procs(list(self.parts), timeout=10)[1]
        for process in alive:
            process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def submit(self, *words: str) -> str:
        """Submit `forge-ray <words>` from a directory with the examples in it, as `ray job submit --working-dir .` does."""
        working = self.directory / "checkout"
        if not working.exists():
            shutil.copytree(ROOT / "examples", working / "examples", ignore=shutil.ignore_patterns("__pycache__"))

        def submitted() -> str | None:
            try:
                return self.jobs.submit_job(entrypoint=shlex.join(["forge-ray", *words]), runtime_env={"working_dir": str(working)})
            except RuntimeError as error:
                if "No available agent" in str(error):  # the dashboard is up before it
                    return None
                raise

        return self.until("the job's agent", submitted)

    def ended(self, job: str) -> tuple[str, int | None, str]:
        """Wait for the job: its status, its driver's exit code and its output."""
        self.until("the job's end", lambda: self.jobs.get_job_status(job).is_terminal())
        info = self.jobs.get_job_info(job)
        return str(info.status.value), info.driver_exit_code, self.jobs.get_job_logs(job)

    def serve_apps(self) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.dashboard}/api/serve/applications/", timeout=60) as answer:
            return sorted(json.load(answer).get("applications", {}))

    def ours(self) -> list[str]:
        """Living processes of runs, by title."""
        found = []
        for process in self.watch():
            try:
                title = (process.cmdline() or [""])[0]
                if title.startswith(OURS) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(title)
            except psutil.Error:
                continue
        return found


def words(policy: Path, directory: Path, name: str, port: int, *, steps: int) -> list[str]:
    """The arguments of a small run as a job's: the config is the one in the job's working directory, the cluster is the job's."""
    given = small_run(policy, directory, name, port, steps=steps)
    given[1] = "examples/quickstart/run.yaml"
    return [word for word in given if word != "ray.address=local"]


def nothing_left(head: Head, directory: Path) -> None:
    assert head.serve_apps() == []
    head.until("the end of the run's processes", lambda: not head.ours(), 60)
    assert sandboxes(directory) == []


def test_jobs_on_a_cluster_with_the_env_file(policy: Path, tmp_path: Path) -> None:
    with Head(tmp_path, env_file=True, ingress=29000) as head:
        # One that runs to its end.
        status, code, log = head.ended(head.submit(*words(policy, tmp_path, "job", 18773, steps=2)))
        assert (status, code) == ("SUCCEEDED", 0), log[-4000:]
        run = RunDir(tmp_path / "runs" / "job")
        assert f"run directory: {run.root}" in log and "without HAProxy" not in log
        assert [row.step for row in read_metrics(run.metrics)] == [1, 2] and run.report.is_file()
        nothing_left(head, tmp_path)

        # One whose run directory would be deleted with the job.
        refused = [word for word in words(policy, tmp_path, "lost", 18773, steps=2) if not word.startswith("runs=")]
        status, code, log = head.ended(head.submit(*refused, "runs=runs"))
        assert (status, code) == ("FAILED", 2), log[-4000:]
        (line,) = [line for line in log.splitlines() if line.startswith("forge-ray: ")]
        assert "temporary copy" in line and "absolute path" in line and "Traceback" not in log

        # One that is stopped while its engine starts.
        job = head.submit(*words(policy, tmp_path, "starting", 18773, steps=2))
        head.until("the engine's start", lambda: "serve starting the engine" in head.jobs.get_job_logs(job))
        head.jobs.stop_job(job)
        status, _, log = head.ended(job)
        assert status == "STOPPED" and f"forge-ray train --resume {tmp_path / 'runs' / 'starting'}" in log, log[-4000:]
        nothing_left(head, tmp_path)

        # One that is stopped while it trains.
        training = RunDir(tmp_path / "runs" / "training")
        job = head.submit(*words(policy, tmp_path, "training", 18773, steps=1000))
        head.until("a step", lambda: read_metrics(training.metrics) and sandboxes(tmp_path))
        head.jobs.stop_job(job)
        status, _, log = head.ended(job)
        assert status == "STOPPED" and f"forge-ray train --resume {training.root}" in log, log[-4000:]
        nothing_left(head, tmp_path)


def test_a_job_on_a_cluster_without_the_env_file(policy: Path, tmp_path: Path) -> None:
    with Head(tmp_path, env_file=False, ingress=29200) as head:
        status, code, log = head.ended(head.submit(*words(policy, tmp_path, "plain", 18774, steps=1)))
        assert (status, code) == ("SUCCEEDED", 0), log[-4000:]
        assert "Serve runs without HAProxy (slower): start Ray with the variables of cluster/ray.env" in " ".join(log.split())
        assert [row.step for row in read_metrics(RunDir(tmp_path / "runs" / "plain").metrics)] == [1]
        nothing_left(head, tmp_path)
