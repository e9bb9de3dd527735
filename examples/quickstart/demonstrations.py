"""Demonstrations for the quickstart's supervised start: what the teacher does, in the quickstart policy's tokens."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from policy import tokenizer
from teacher import episodes, render, write


def make(out: str | Path, seed: int, count: int = 4000, p_right: float = 0.35, output_chars: int = 60) -> None:
    """Write `demonstrations.parquet` to `out`: `count` episodes, of which a share `p_right` follows a strategy that works.

    The wrong ones are not filtered out: the policy starts with a mixture of habits, and reinforcement selects. `output_chars` must be the
    harness's, else the demonstrations show tool output that no rollout shows.
    """
    write(Path(out), render(episodes(seed, count, p_right, output_chars), tokenizer()))
