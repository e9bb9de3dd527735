"""Checkpoints: `checkpoints/step-000012/`, a Hugging Face model directory plus what an exact resume needs.

A checkpoint of step k holds the weights after k updates. It is written under a hidden name and renamed when every byte is on disk:
a directory with the final name is complete, and a crash during a save leaves the previous one in force. The data cursor is k
itself, since the batch of a step is fixed once formed (`exchange.py`); accepted rollouts that no step has used yet lie in `rollouts/`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.errors import ForgeRayError
from forge_ray.run_dir import RunDir

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

NAME = re.compile(r"step-(\d{6,})")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


class CheckpointError(ForgeRayError):
    """A checkpoint cannot be read or does not belong to this run."""


def path(run: RunDir, step: int) -> Path:
    return run.checkpoints / f"step-{step:06d}"


def steps(run: RunDir) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    found = (NAME.fullmatch(entry.name) for entry in run.checkpoints.iterdir()) if run.checkpoints.is_dir() else ()
    return sorted(int(match.group(1)) for match in found if match)


def latest(run: RunDir) -> int | None:
    return max(steps(run), default=None)


def save(
    run: RunDir, step: int, model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, *, tokenizer_from: Path, extra: dict[str, Any]
) -> Path:
    """Write the checkpoint of `step` durably; an existing one of the same step is replaced. `extra` must be JSON."""
    import torch

    target = path(run, step)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file() and not (temporary / name).exists():
            shutil.copy2(tokenizer_from / name, temporary / name)
    if optimizer is not None:
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    torch.save(
        {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}, temporary / "rng.pt"
    )
    (temporary / "trainer.json").write_text(json.dumps({"step": step, **extra}))
    for file in [*temporary.iterdir(), temporary]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.replace(target, replaced)
    os.replace(temporary, target)
    shutil.rmtree(replaced, ignore_errors=True)
    handle = os.open(run.checkpoints, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    return target


def restore(run: RunDir, step: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load optimizer state and RNG of the checkpoint of `step`; returns its JSON. A resume that cannot be exact is refused."""
    import torch

    directory = path(run, step)
    try:
        extra = json.loads((directory / "trainer.json").read_text())
        if (directory / "optimizer.pt").exists():
            optimizer.load_state_dict(torch.load(directory / "optimizer.pt", map_location="cpu", weights_only=True))
        elif step > 0:
            raise CheckpointError(f"{directory} has no optimizer.pt: the resume would not be exact")
        state = torch.load(directory / "rng.pt", weights_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{directory} cannot be read ({error})") from error
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    return extra


def prune(run: RunDir, keep: int, *, protect: int | None = None) -> None:
    """Keep the newest `keep` checkpoints, and `protect` (the reference policy of the KL term)."""
    for step in steps(run)[:-keep]:
        if step != protect:
            shutil.rmtree(path(run, step))
