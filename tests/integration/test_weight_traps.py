"""The traps of a weight update on CPU are real: without our care the error is far above the bound, with it far below."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from forge_ray import ray_env
from tests.tiny_model import tiny_model


def test_the_traps_have_teeth(tmp_path: Path) -> None:
    """In a process of its own: the engine there runs without a child."""
    command = [sys.executable, "-m", "tests.integration.weight_traps", str(tiny_model()), str(tmp_path)]
    environment = {**os.environ, **ray_env.worker()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("prompt_tokens") > 300
    assert found.pop("careless/stale head") > 1e-2
    assert found.pop("forge_ray_file/stale prefix cache") > 1e-2
    assert min(found.pop(f"forge_ray_file/not adapted {number}") for number in (4, 5)) > 1e-2
    assert max(found.pop(f"forge_ray_file/adapters {number}") for number in (4, 5)) < 1e-5
    assert all(value < 1e-4 for value in found.values()), found
