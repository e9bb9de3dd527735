"""The quickstart's teacher in SmolLM2's tokens: the same problems, the same commands, another chat template."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))  # last: its `policy` is not ours

from policy import tokenizer
from teacher import episodes, render, write  # pyright: ignore[reportMissingImports]


def make(out: str | Path, seed: int, count: int = 400, p_right: float = 0.35, output_chars: int = 60) -> None:
    """Write `demonstrations.parquet` to `out`; the options are those of the quickstart's `demonstrations.make`."""
    write(Path(out), render(episodes(seed, count, p_right, output_chars), tokenizer()))
