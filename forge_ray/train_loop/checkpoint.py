"""Checkpoints: `checkpoints/step-000012/`, a Hugging Face model directory plus what an exact resume needs.

A checkpoint of step k holds the weights after k updates. It is written under a hidden name and renamed when every byte is on disk:
a directory with the final name is complete, and a crash during a save leaves the previous one in force. What a disk or a copy does to it
later is seen from the sizes that it was written with: a resume takes the newest one that is whole. The data cursor is k itself, since the
batch of a step is fixed once formed (`exchange.py`); accepted rollouts that no step has used yet lie in `rollouts/`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.errors import ForgeRayError
from forge_ray.model_files import model_problem
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
    return run.checkpoints / path_name(step)


def path_name(step: int) -> str:
    return f"step-{step:06d}"


def steps(run: RunDir) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    found = (NAME.fullmatch(entry.name) for entry in run.checkpoints.iterdir()) if run.checkpoints.is_dir() else ()
    return sorted(int(match.group(1)) for match in found if match)


def latest(run: RunDir) -> int | None:
    """Step of the newest checkpoint that is whole. Raises `CheckpointError` where there are some and none is."""
    return newest(run)[0]


def newest(run: RunDir) -> tuple[int | None, list[str]]:
    """`latest`, and for each newer one that is not whole what is wrong with it. Raises `CheckpointError`."""
    wrong: list[str] = []
    for step in reversed(steps(run)):
        if (what := problem(path(run, step))) is None:
            return step, wrong
        wrong.append(what)
    if wrong:
        raise CheckpointError(f"no checkpoint of {run.root} is whole: {'; '.join(wrong)}")
    return None, []


def problem(directory: Path) -> str | None:
    """What is wrong with a checkpoint, as far as can be seen without reading it all; None if it is whole. Names the file."""
    try:
        extra = json.loads((directory / "trainer.json").read_bytes())
        sizes: dict[str, int] = extra.get("files", {})
        for name, size in sizes.items():
            found = (directory / name).stat().st_size
            if found != size:
                return f"{directory / name} has {found} bytes, {size} were written"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except (ValueError, AttributeError, RecursionError) as error:
        return f"{directory / 'trainer.json'} is damaged ({error})"
    for file in (directory / "optimizer.pt", directory / "rng.pt"):  # torch's files are zip archives
        if not zipfile.is_zipfile(file) and (file.exists() or directory.name != path_name(0)):
            return f"{file} is {'damaged' if file.exists() else 'missing'}"
    return model_problem(directory)


def load(directory: Path) -> PreTrainedModel:
    """The model in `directory`, in float32. Raises `CheckpointError`, since trying again would not help."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the libraries below make of a bad file
        words = " ".join(str(error).split())[-300:] or type(error).__name__
        raise CheckpointError(f"the model in {directory} cannot be loaded ({words})") from error


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
    sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
    (temporary / "trainer.json").write_text(json.dumps({"step": step, **extra, "files": sizes}))
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
    except CheckpointError:
        raise
    except Exception as error:  # whatever torch makes of a bad file
        raise CheckpointError(f"{directory} cannot be read ({' '.join(str(error).split())[:300]})") from error
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    return extra


def prune(run: RunDir, keep: int, *, upto: int, protect: int | None = None) -> None:
    """Keep the newest `keep` checkpoints of those `upto` the one that was just written, and `protect` (the reference policy of the KL
    term). A later one is a damaged one that a resume left out: it makes no whole one superfluous."""
    for step in [step for step in steps(run) if step <= upto][:-keep]:
        if step != protect:
            shutil.rmtree(path(run, step))
