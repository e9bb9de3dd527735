"""What /proc tells about processes, and killing by marker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from forge_ray.sandboxes import processes
from forge_ray.sandboxes.processes import MARKER


def test_a_process_is_found_in_the_moment_of_its_start(tmp_path: Path) -> None:
    # Popen returns while the kernel still lays out the new program's environment.
    for number in range(100):
        directory = tmp_path / str(number)
        process = subprocess.Popen(["sleep", "1000"], env={MARKER: str(directory), "PATH": os.environ["PATH"]})
        assert processes.kill_marked(directory) == []
        assert process.wait(60) == -9


def test_only_the_whole_marker_counts(tmp_path: Path) -> None:
    near = [{MARKER: f"{tmp_path}1"}, {f"X{MARKER}": str(tmp_path)}, {"X": f"{MARKER}={tmp_path}"}, {}]
    started = [subprocess.Popen(["/bin/sleep", "1000"], env=env) for env in near]
    try:
        assert processes.marked(tmp_path) == []
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_descendants_and_start_times() -> None:
    script = "sleep 1000 & sh -c 'sleep 1000; :' & echo; wait"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        while len(found := processes.descendants(process.pid)) < 3:
            pass
        assert process.pid not in found and found < processes.descendants(os.getpid())
        own, other = processes.start_time(os.getpid()), processes.start_time(process.pid)
        assert own is not None and other is not None and own <= other
        assert processes.start_time(1 << 22) is None and processes.pid_namespace(1 << 22) is None
        namespace = processes.pid_namespace(os.getpid())
        assert namespace is not None and processes.population(namespace, max_age_s=0) >= 4
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close() if process.stdout else None
