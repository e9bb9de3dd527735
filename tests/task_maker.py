"""Small task directories for tests."""

from __future__ import annotations

import textwrap
from pathlib import Path

DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /workspace\n"
ALWAYS_ONE = "#!/bin/sh\necho 1 > ${VERIFIER_DIR:-/logs/verifier}/reward.txt\n"


def make_task(
    directory: Path,
    *,
    toml: str = "",
    instruction: str = "Do it.\n",
    dockerfile: str = DOCKERFILE,
    test: str = ALWAYS_ONE,
    environment: dict[str, str] | None = None,
    tests: dict[str, str] | None = None,
) -> Path:
    """Write a task; `environment` and `tests` are further files of those folders. Returns `directory`."""
    files = {"task.toml": textwrap.dedent(toml), "instruction.md": instruction, "environment/Dockerfile": dockerfile, "tests/test.sh": test}
    files |= {f"environment/{name}": text for name, text in (environment or {}).items()}
    files |= {f"tests/{name}": text for name, text in (tests or {}).items()}
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory
