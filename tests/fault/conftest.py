"""One policy after a short SFT, for every run of these tests: made once, and kept under a digest of what it is made by."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fault.command import ROOT


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directory of a quickstart policy that solves some tasks and fails at others."""
    digest = hashlib.sha256()
    for file in (
        Path(__file__).with_name("prepare.py"),
        *sorted((ROOT / "examples" / "quickstart").glob("*.py")),
        *sorted((ROOT / "forge_ray" / "train_loop").glob("*.py")),
        ROOT / "forge_ray" / "harnesses" / "react_program.py",
        ROOT / "examples" / "quickstart" / "chat_template.jinja",
    ):
        digest.update(file.read_bytes())
    kept = Path(tempfile.gettempdir(), f"forge-ray-tests-{os.geteuid()}", f"prepared-{digest.hexdigest()[:12]}")
    if not kept.is_dir():
        made = tmp_path_factory.mktemp("prepared") / "made"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.fault.prepare", str(made)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        building = kept.with_name(f".{kept.name}.{os.getpid()}")
        shutil.copytree(made / "policy", building)
        try:
            os.rename(building, kept)
        except OSError:  # another session was faster
            shutil.rmtree(building)
    return kept
