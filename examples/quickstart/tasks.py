"""Writes problems as Harbor-format task directories: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

The verifier is plain `sh` with one `head` per expected file: a training step runs a hundred of them. It compares text with the white space
at both ends removed, and neither follows a link nor opens a pipe that an agent left where a file should be.
"""

from __future__ import annotations

import random
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from families import FAMILIES, SHOWN, Problem, Split, problem

VERIFIER = """\
#!/bin/sh
# Reward 1 if every file below tests/expected stands in the workspace with the same text, white space at both ends aside; else 0.
trim() {
    text=${1#"${1%%[![:space:]]*}"}
    text=${text%"${text##*[![:space:]]}"}
}

tests=${TESTS_DIR:-/tests}
cd "${WORKSPACE:-/workspace}" || exit 1
reward=1
for file in "$tests"/expected/*; do
    name=${file##*/}
    if [ -f "$name" ] && [ ! -L "$name" ]; then
        trim "$(head -c 10000 "$file")"
        wanted=$text
        trim "$(head -c 10000 "$name")"
        [ "$text" = "$wanted" ] && [ "$(wc -c < "$name")" -le 10000 ] || reward=0
    else
        reward=0
    fi
done
echo "$reward" > "${VERIFIER_DIR:-/logs/verifier}/reward.txt"
"""

DOCKERFILE = """\
FROM debian:bookworm-slim
WORKDIR /workspace
COPY files/ /workspace/
"""


def train(out: str | Path, seed: int, count: int = 240) -> None:
    """`count` training tasks below `out`, equally over the families."""
    write(Path(out), "train", seed, count)


def heldout(out: str | Path, seed: int, count: int = 24) -> None:
    """`count` tasks below `out` whose names and values no training task or demonstration has."""
    write(Path(out), "heldout", seed, count)


def development(out: str | Path, seed: int, count: int = 24) -> None:
    """Like `heldout`, from a third split: for choosing settings without looking at `heldout`."""
    write(Path(out), "development", seed, count)


def write(out: Path, split: Split, seed: int, count: int) -> None:
    """Write `count` different tasks of `split`; the same arguments give the same files."""
    rng = random.Random(f"{split} {seed}")
    seen: set[str] = set()
    while len(seen) < count:
        family = list(FAMILIES)[len(seen) % len(FAMILIES)]
        drawn = problem(family, rng, split)
        if drawn.instruction not in seen:
            write_task(out / f"{family}-{len(seen) // len(FAMILIES):03d}", drawn)
            seen.add(drawn.instruction)


def write_task(directory: Path, task: Problem) -> None:
    """Write one task directory."""
    files = {
        "task.toml": 'schema_version = "1.4"\n\n'
        f'[metadata]\nfamily = "{task.family}"\n\n[agent]\ntimeout_sec = 60.0\n\n[verifier]\ntimeout_sec = 30.0\n',
        "instruction.md": task.instruction + "\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": VERIFIER,
        "solution/solve.sh": solution(task),
    }
    files |= {f"environment/files/{name}": text + "\n" for name, text in task.files.items()}
    files |= {f"tests/expected/{name}": text + "\n" for name, text in task.expected.items()}
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("tests/test.sh", "solution/solve.sh"):
        (directory / name).chmod(0o755)


def solution(task: Problem, strategy: int = -1) -> str:
    """A shell script that follows one of the task's right strategies (the last by default: it reads what it printed where one does)."""
    lines = ["#!/bin/sh", 'cd "${WORKSPACE:-/workspace}" || exit 1']
    commands = task.right[strategy]
    for index, command in enumerate(commands):
        command = command.replace(SHOWN, '"$shown"')
        lines.append(f"shown=$({command})" if index + 1 < len(commands) else command)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("train", "heldout", "development"):
        sys.exit(f"usage: {shlex.quote(sys.argv[0])} train|heldout|development DIRECTORY SEED")
    {"train": train, "heldout": heldout, "development": development}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
