"""The modules of examples/quickstart, for tests: imported by name from their own directory, as `forge_ray.job.sources` does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parents[1] / "examples" / "quickstart"


def module(name: str) -> Any:
    """Import `examples/quickstart/<name>.py`."""
    if str(DIRECTORY) not in sys.path:
        sys.path.insert(0, str(DIRECTORY))
    found = importlib.import_module(name)
    assert found.__file__ is not None and Path(found.__file__).parent == DIRECTORY
    return found
