"""Weights reach a replica on another node than the trainer's through the object store, and one on the same node without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fault.command import ROOT

PORT = int(os.environ.get("FORGE_RAY_TEST_PORT", "18710")) + 8


@pytest.mark.timeout(600)
def test_weights_go_to_another_node_through_the_object_store(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"say": "hello"}]))
    with tempfile.TemporaryDirectory(prefix="fr-", dir="/tmp") as root:  # short: Ray's sockets lie below it
        command = [sys.executable, "-m", "tests.fault.two_nodes", root, str(PORT), str(script)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["head"] != found["replica"]
    assert found["versions"][1:] == ["1.1", "1.2"] and found["current"] == "1.3"
    assert found["stored on"] == sorted([found["head"], found["replica"]]), "a copy on each node"
    size = found["bytes"][-1]
    assert found["bytes"] == [size, 0, size]
